"""The command line itself."""

import importlib
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

import trainwright
from trainwright.cli.commands import COMMANDS, MEANINGS, line_for, module_of
from trainwright.cli.main import main


def test_help_is_printed_and_is_no_error(run_python, tmp_path: Path) -> None:
    for arguments in (["--help"], []):
        done = run_python("-m", "trainwright.cli.main", *arguments, cwd=tmp_path)
        assert "trainwright train config.py" in done.stdout
        assert "--resume" in done.stdout
        for name, text in COMMANDS.items():
            assert f"  {name} " in done.stdout
            assert text in done.stdout
        assert max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_has_a_parser_and_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = importlib.import_module(module_of(name)).parser()
    assert parser.prog == f"trainwright {name}"
    with suppress(SystemExit):
        assert main([name, "--help"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith(f"usage: trainwright {name} ")
    assert said.err == ""
    if name == "train":
        for word in ("--config-file", "--resume", "--eval-only", "--fast-dev-run", "--allow-module", "optim.lr=1e-3"):
            assert word in said.out


def test_the_package_runs_the_command_line(run_python, tmp_path: Path) -> None:
    done = run_python("-m", "trainwright", "train", cwd=tmp_path, code=2)
    assert "No configuration file" in done.stderr


def test_the_version_is_printed(run_python, tmp_path: Path) -> None:
    done = run_python("-m", "trainwright.cli.main", "--version", cwd=tmp_path)
    assert done.stdout == f"trainwright {trainwright.__version__}\n"


CONFIG = """
import torch
from trainwright import LazyCall, get_config
model = LazyCall(torch.nn.Linear)(in_features=4, out_features=2)
dataloader = dict(train=LazyCall(torch.utils.data.DataLoader)(dataset=[0.0] * 32, batch_size=32), test=[])
optim = LazyCall(torch.optim.SGD)(lr=0.1)
train = get_config("common/train.py").train
"""
WRONG = [
    ("trian config.py", "'trian'", "Did you mean 'train'?"),
    ("lunch train", "'lunch'", "Did you mean 'launch'?"),
    ("--versoin", "no option '--versoin'", "Did you mean '--version'?"),
    ("config.py", "config.py is a file: trainwright train config.py"),
    ("export", "no command 'export'", "Write: trainwright checkpoint export RUN", "trainer.export(path)"),
    ("test output", "no command 'test'. Write: trainwright eval output\n"),
    ("Validate", "Write: trainwright eval RUN\n"),
    ("fit config.py optim.lr=1", "Write: trainwright train config.py optim.lr=1\n"),
    ("resume", "Write: trainwright train CONFIG --resume\n"),
    ("resume .", "Write: trainwright train ./config.yaml --resume\n"),
    ("init", "Write: trainwright new PROJECT\n"),
    ("tensorboard output", "Write: tensorboard --logdir output\n"),
    ("sweep", "--sweep"),
    ("train", "No configuration file", "trainwright train"),
    ("train config.py --resum", "--resum", "--resume"),
    ("train config.py -help", "-help", "'--help'"),
    ("train config.py -resume", "'-resume'", "Did you mean '--resume'?"),
    ("train config.py max_iter=1", "'max_iter=1'", "Did you mean 'train.train_iter'?"),
    ("train config.py log_period=1", "Did you mean 'train.log_period'?"),
    ("train configs/confg.py", "configs/confg.py"),
    ("check config.py --only label", "Did you mean 'labels'?"),
    ("check config.py train.sed=1", "Did you mean 'seed'?"),
    ("check config.py --max-seconds 0", "argument --max-seconds", "got '0'; it must be a number above 0."),
    ("check config.py --max-seconds nan", "argument --max-seconds", "got 'nan'; it must be a number above 0."),
    ("config shw", "Did you mean 'show'?"),
    ("config show", "For example: trainwright config show"),
    ("config show confg.py", "Did you mean 'config.py'?"),
    ("config show config.py optm.lr=1", "Did you mean 'optim.lr'?"),
    ("config diff config.py .", "no config file, and no folder of a run"),
    ("config schema --output nowhere/s.json", "no folder nowhere"),
    ("doctor --port 65536", "argument --port", "got '65536'; it must be a whole number from 1 to 65535."),
    ("estimate config.py --memory much", "--memory: got 'much'; it must be a size such as 80GiB"),
    ("estimate config.py --memory 80", "--memory: got '80', which is a number of bytes. Give a unit: 80GiB."),
    ("estimate config.py --world x", "argument --world", "got 'x'; it must be a whole number >= 1."),
    ("estimate config.py train.sed=1", "Did you mean 'seed'?"),
    ("eval", "For example: trainwright eval"),
    ("eval nowhere", "nowhere: no such run or config file"),
    ("eval .", "is not a run"),
    ("eval config.py", "nothing was trained", "Train first: `trainwright train CONFIG`"),
    ("find", "trainwright find: got ''"),
    ("find batchsize config.py", "Did you mean 'batch-size'?"),
    ("find batch-size config.py", "Give --memory 24GiB"),
    ("find batch-size config.py --max-size 0", "argument --max-size", "got '0'; it must be a whole number >= 1."),
    ("find lr config.py --lowest 1 --highest 0.1", "lowest < highest"),
    ("find lr config.py --lowest low", "argument --lowest", "got 'low'; it must be a number above 0."),
    ("find lr config.py --updates 19", "argument --updates", "got '19'; it must be a whole number >= 20."),
    ("launch", "nothing to run", "trainwright launch -n 2 train config.py"),
    ("launch -n 2 trian config.py", "'trian'", "Did you mean 'train'?"),
    ("launch -n 2 launch train", "cannot run itself"),
    ("launch -n 2 missing.py", "missing.py: no such file"),
    ("launch -n 0 train", "--nproc-per-node", "'0'", ">= 1"),
    ("launch --max-restarts -1 train", "argument --max-restarts", "got '-1'; it must be a whole number >= 0."),
    ("launch --nnodes 3:2 train", "--nnodes", "'3:2'", "A <= B"),
    ("launch --nnodes 2 train", "--nnodes 2 needs --rdzv-endpoint HOST:PORT", ":29500"),
    ("launch --nnodes 2 --master-addr a train", "--node-rank"),
    ("launch --nproc-per-nodes 2 train", "Did you mean '--nproc-per-node'?"),
    ("launch --redirects x train", "--redirects", "'x'", "0:3,1:2"),
    ("launch --tee 0:4 train", "--tee", "'0:4'"),
    ("predict run a.txt --batch-size 1.5", "argument --batch-size", "got '1.5'; it must be a whole number >= 1."),
    ("replay run --step first", "argument --step", "got 'first'; it must be a whole number >= 1."),
    ("report", "RUN"),
    ("report nowhere", "nowhere: there is no such folder"),
    ("report .", "no run", "output_dir"),
    ("report . --port 1", "--port", "--serve"),
    ("report run --port x", "argument --port", "got 'x'; it must be a whole number from 0 to 65535."),
]


@pytest.mark.parametrize(("line", "facts"), [(line, facts) for line, *facts in WRONG], ids=[one[0] for one in WRONG])
def test_wrong_arguments_exit_with_2_and_name_the_right_ones(
    line: str, facts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.py").write_text(CONFIG)
    try:
        code = main(line.split())
    except SystemExit as ended:
        code = ended.code
    said = capsys.readouterr().err
    assert (code, "Traceback" in said) == (2, False)
    for fact in facts:
        assert fact in said


@pytest.mark.parametrize("name", MEANINGS)
def test_each_line_for_the_command_of_another_program_is_accepted(name: str) -> None:
    assert name not in COMMANDS
    line = line_for(name, [])
    assert line is not None
    if not line.startswith("trainwright ") or line.split()[1] not in COMMANDS:
        assert any(fact in line for fact in ("tensorboard --logdir", "--version", "--help", " in Python"))
        return
    _, command, *arguments = line.partition(" (")[0].split()
    parser = importlib.import_module(module_of(command)).parser()
    parser.parse_known_args(arguments) if command == "launch" else parser.parse_args(arguments)


def test_the_page_of_the_command_line_has_all_commands() -> None:
    page = (Path(__file__).parents[2] / "docs" / "command-line.md").read_text(encoding="utf-8")
    table = "\n".join(line for line in page.splitlines() if line.startswith("| `"))
    assert [name for name in COMMANDS if f"`{name} " not in table and f"`{name}`" not in table] == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a disk without space")
def test_output_that_cannot_be_written_is_one_message(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "trainwright"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "No space left on device" in line


def test_a_reader_that_has_ended_is_no_message() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([sys.executable, "-m", "trainwright"], stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


def test_a_name_that_the_terminal_cannot_show_is_escaped(tmp_path: Path) -> None:
    (tmp_path / "é🔥").mkdir()
    command = [sys.executable, "-m", "trainwright", "runs", "é🔥"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "\\xe9\\U0001f525: no runs.\n")
