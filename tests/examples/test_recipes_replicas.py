"""Copies of a data-parallel run by torchft: they go on without one that is killed, and take it back."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fork_server import python

coordination = pytest.importorskip("torchft.coordination", reason="pip install torchft: for Linux on x86-64")

RECIPE = Path(__file__).parents[2] / "examples" / "recipes" / "replicas_torchft.py"


@pytest.mark.slow
def test_copies_go_on_without_a_killed_one_and_take_it_back(tmp_path: Path) -> None:
    lighthouse = coordination.LighthouseServer(
        bind="[::]:0", min_replicas=1, join_timeout_ms=100, heartbeat_timeout_ms=1000
    )
    started: list[subprocess.Popen[bytes]] = []

    def start(copy: int) -> subprocess.Popen[bytes]:
        arguments = [
            str(copy),
            lighthouse.address().replace("://" + os.uname().nodename, "://localhost"),
            str(tmp_path),
        ]
        process = subprocess.Popen([python(), str(RECIPE), *arguments, "1000000"], stderr=subprocess.DEVNULL)
        started.append(process)
        return process

    def copies() -> float:
        return next((row["copies"] for row in reversed(rows_of(tmp_path / "0" / "metrics.json"))), 0)

    try:
        first, second = start(0), start(1)
        wait_until(lambda: copies() == 2)
        second.kill()
        wait_until(lambda: copies() == 1)
        start(1)
        wait_until(lambda: copies() == 2)
        wait_until(lambda: rows_of(tmp_path / "0" / "metrics.json")[-1]["total_loss"] < 0.1)
        first.send_signal(signal.SIGTERM)
        assert first.wait(30) == 128 + signal.SIGTERM
    finally:
        for process in started:
            process.kill()
            process.wait()
        lighthouse.shutdown()
    iterations = [row["iteration"] for row in rows_of(tmp_path / "0" / "metrics.json")]
    assert iterations == sorted(set(iterations))  # the first copy took no step back


def rows_of(file: Path) -> list[dict[str, Any]]:
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def wait_until(happened: Callable[[], bool]) -> None:
    end = time.monotonic() + 90
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.2)
