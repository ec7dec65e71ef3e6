"""A terminal, pipe or file that takes no more lines ends no program."""

import io
import os
import subprocess
import textwrap
from pathlib import Path

import pytest

from tests.fork_server import python
from trainwright.base.errors import ConfigError, ConfigKeyError
from trainwright.base.terminal import guarded, is_terminal, print_line, printable

TRAINING = """
import os, sys, torch
from trainwright import Trainer, TrainingConfig
data = torch.utils.data.TensorDataset(torch.randn(100, 4), torch.randint(0, 3, (100,)))
config = TrainingConfig(output_dir=sys.argv[1], num_epochs=3, batch_size=2, device_str="cpu", **eval(sys.argv[2]))
Trainer(torch.nn.Linear(4, 3), config, data, data).train()
print("done")
"""


def test_what_a_terminal_takes_for_a_command_is_escaped() -> None:
    assert printable("a\x1b[2Jb\r\x07\udcff\u202e\tä\n漢") == "a\\x1b[2Jb\\r\\x07\\udcff\\u202e\tä\n漢"
    assert str(ConfigError("run\x1b]0;x\x07")) == "run\\x1b]0;x\\x07"
    assert str(ConfigKeyError("run\x1b[2J")) == "run\\x1b[2J"
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    print_line("loss 漢 \udcff", file=stream)  # marks that the encoding lacks
    assert raw.getvalue() == b"loss \\u6f22 \\udcff\n"


@pytest.mark.skipif(os.name == "nt", reason="pipes end otherwise there")
def test_a_pipe_whose_reader_has_ended_takes_lines_and_loses_them() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as stream:
        print_line("lost", file=stream)
        print("what the program itself prints", file=stream, flush=True)


def test_a_closed_stream_is_no_terminal_and_takes_lines() -> None:
    stream = io.StringIO()
    stream.close()
    print_line("lost", file=stream)
    guarded(stream).flush()
    assert not is_terminal(stream)
    assert not is_terminal(None)
    assert guarded(stream) == stream == guarded(stream) != io.StringIO()


@pytest.mark.skipif(os.name == "nt", reason="needs a shell")
@pytest.mark.exhaustive(every=5)
@pytest.mark.parametrize("settings", ["{}", "{'print_steps': 1}"])
@pytest.mark.parametrize("streams", ["| head -1", "<&- >&- 2>&-", "2>&1 | head -1"])
def test_a_training_ends_well_where_nothing_reads_what_it_prints(tmp_path: Path, streams: str, settings: str) -> None:
    script = tmp_path / "training.py"
    script.write_text(textwrap.dedent(TRAINING))
    command = f'set -o pipefail; "{python()}" "{script}" "{tmp_path}/run" "{settings}" {streams}'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    rows = (tmp_path / "run" / "metrics.json").read_text().splitlines()
    assert '"iteration": 150' in rows[-1]
    assert all(line.startswith("{") for line in rows)
    assert (tmp_path / "run" / "final_epoch" / "manifest.json").is_file()
