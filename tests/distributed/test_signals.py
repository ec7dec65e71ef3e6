"""A signal to the launcher: all ranks stop at the same iteration, and a restart is as if none had."""

import json
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.torchrun import started

HERE = Path(__file__).parent
TRAIN_NET = HERE.parents[1] / "tools" / "train_net.py"
LONG = ("train.train_iter=1200", "train.log_period=20", "train.checkpointer.period=500", "train.eval_period=600")


def launch(folder: Path) -> "subprocess.Popen[str]":
    seen = folder.parent / "seen"
    seen.mkdir(exist_ok=True)
    given = ("--config-file", HERE / "config.py", "--resume", *LONG, f"train.output_dir={folder}")
    return started(TRAIN_NET, *given, SEEN_FOLDER=str(seen))


def rows(folder: Path) -> list[dict[str, float]]:
    read = [json.loads(line) for line in (folder / "metrics.json").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name not in ("time", "data_time")} for row in read]


def wait_until_trained(folder: Path) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if (folder / "metrics.json").exists() and len((folder / "metrics.json").read_text().splitlines()) >= 3:
            return
        time.sleep(0.01)
    raise AssertionError("the run has not begun")


@pytest.mark.exhaustive
def test_all_ranks_stop_at_one_iteration_and_go_on_from_it(tmp_path: Path) -> None:
    uninterrupted, folder = tmp_path / "whole", tmp_path / "run"
    process = launch(uninterrupted)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    process = launch(folder)
    wait_until_trained(folder)
    start = time.monotonic()
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert time.monotonic() - start < 20
    assert process.returncode != 0

    said = [
        re.findall(r"SIGTERM: saved after iteration (\d+); stopped", (folder / name).read_text())
        for name in ("log.txt", "log.txt.rank1")
    ]
    assert said[0] == said[1], output
    assert len(said[0]) == 1, output
    stopped_after = int(said[0][0])
    assert (folder / "last_checkpoint").read_text() == f"model_{stopped_after - 1:07d}"

    again = launch(folder)
    output, _ = again.communicate(timeout=120)
    assert again.returncode == 0, output
    assert f"Iterations  {stopped_after + 1} to 1200" in output
    assert rows(folder) == rows(uninterrupted)
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (folder / "model_final" / name).read_bytes() == (uninterrupted / "model_final" / name).read_bytes()
