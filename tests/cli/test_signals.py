"""A run of the command that is asked to stop, and started again with the same command line."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.fork_server import python

TIMINGS = {"time", "data_time"}


def rows(folder: Path) -> list[dict[str, float]]:
    read = [json.loads(line) for line in (folder / "metrics.json").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name not in TIMINGS} for row in read]


def start(
    arguments: list[str], folder: Path, environment: dict[str, str], program: str = sys.executable
) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [program, "-m", "trainwright.cli.main", "train", *arguments, "--resume", f"train.output_dir={folder}"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for_rows(folder: Path, count: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if (folder / "metrics.json").exists() and len((folder / "metrics.json").read_text().splitlines()) >= count:
            return
        time.sleep(0.005)
    raise AssertionError("the run has not come so far")


def wait_for_handler(process: "subprocess.Popen[str]") -> None:
    """Wait until the program handles signals; it still has to load torch."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        status = Path(f"/proc/{process.pid}/status").read_text()
        caught = int(status.partition("SigCgt:")[2].split()[0], 16)
        if caught >> (signal.SIGUSR1 - 1) & 1:
            return
        time.sleep(0.005)
    raise AssertionError("the program handles no signals")


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, -signal.SIGINT), (signal.SIGKILL, -signal.SIGKILL)]
)
@pytest.mark.exhaustive(every=3)
def test_stopped_and_started_again_is_as_never_stopped(
    finished, short, sha, environment, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    folder = tmp_path / "output"
    arguments = [str(finished.config), *short]
    # A kill must end the program itself: at once, so that the next one may have the folder.
    process = start(arguments, folder, environment, sys.executable if number == signal.SIGKILL else python())
    wait_for_rows(folder, 2)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == code, output
    assert "Traceback" not in output
    if number != signal.SIGKILL:
        saved = re.search(
            rf"{number.name}: saved after iteration (\d+); stopped; --resume continues from there", output
        )
        assert saved is not None, output
        assert (folder / "last_checkpoint").read_text() == f"model_{int(saved[1]) - 1:07d}"

    again = start(arguments, folder, environment, python())
    output, _ = again.communicate(timeout=60)
    assert again.returncode == 0, output
    if number != signal.SIGKILL:
        assert f"Iterations  {int(saved[1]) + 1} to 60" in output
    assert rows(folder) == rows(finished.folder)
    for name in ("model_final", "model_best"):
        assert sha(folder / name) == sha(finished.folder / name)
    assert not [entry for entry in folder.iterdir() if entry.name.startswith(".tmp")]


def test_sigusr1_saves_and_the_run_goes_on(finished, short, sha, environment, tmp_path: Path) -> None:
    folder = tmp_path / "output"
    process = start([str(finished.config), *short, "train.checkpointer.max_to_keep=10"], folder, environment, python())
    wait_for_rows(folder, 2)
    process.send_signal(signal.SIGUSR1)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    saved = re.search(r"SIGUSR1: saved after iteration (\d+); continuing", output)
    assert saved is not None, output
    assert (folder / f"model_{int(saved[1]) - 1:07d}" / "manifest.json").is_file()
    assert sha(folder / "model_final") == sha(finished.folder / "model_final")
    assert rows(folder) == rows(finished.folder)


@pytest.mark.parametrize(
    ("number", "code"),
    [pytest.param(signal.SIGUSR1, 0, marks=pytest.mark.exhaustive), (signal.SIGINT, -signal.SIGINT)],
)
def test_a_signal_before_the_first_step(
    number: signal.Signals, code: int, finished, short, environment, tmp_path: Path
) -> None:
    process = start([str(finished.config), *short], tmp_path / "output", environment)
    wait_for_handler(process)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == code, output
    assert "Traceback" not in output


LOOP = """
for name in first second; do
  "$0" -m trainwright train "$@" train.output_dir=$name
  echo "next: $?"
done
"""


def test_ctrl_c_ends_a_loop_of_the_shell_too(finished, short, environment, tmp_path: Path) -> None:
    """A shell continues after a program that ends with 130; it ends after one that the signal has ended."""
    words = ["bash", "-c", LOOP, python(), str(finished.config), *short]
    # Both get the signal, as from a terminal.
    loop = subprocess.Popen(
        words, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    wait_for_rows(tmp_path / "first", 2)
    os.killpg(loop.pid, signal.SIGINT)
    output, _ = loop.communicate(timeout=60)
    assert loop.returncode == -signal.SIGINT
    assert "SIGINT: saved after iteration" in output
    assert "next" not in output
    assert not (tmp_path / "second").exists()
