"""A signal to one rank, or to the launcher: all ranks stop at the same iteration, and a restart is as if none had."""

import json
import os
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


def ranks_of(folder: Path) -> dict[int, int]:
    """The process that torchrun has started for each rank of the run in ``folder``."""
    found, own = {}, f"SEEN_FOLDER={folder.parent / 'seen'}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environment = (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            rank = next((int(value[5:]) for value in environment if value.startswith(b"RANK=")), None)
            if own in environment and rank is not None:
                found[rank] = int(entry.name)
    return found


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


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "whole"
    process = launch(folder)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    return folder


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds the ranks by /proc")
@pytest.mark.exhaustive
@pytest.mark.parametrize("to", ["rank 0", "rank 1", "launcher"])
def test_all_ranks_stop_at_one_iteration_and_go_on_from_it(uninterrupted: Path, tmp_path: Path, to: str) -> None:
    folder = tmp_path / "run"
    process = launch(folder)
    wait_until_trained(folder)
    ranks = ranks_of(folder)
    assert sorted(ranks) == [0, 1]
    start = time.monotonic()
    os.kill(process.pid if to == "launcher" else ranks[int(to[-1])], signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert time.monotonic() - start < 20
    assert process.returncode != 0
    assert not ranks_of(folder)

    said = [
        re.findall(r"SIGTERM: saved after iteration (\d+); stopping", (folder / name).read_text())
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
