"""Streams and the loop of the user's own on two processes: shares, uneven ends, and exact resume."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("streams")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1"]
    command += ["--master-port", str(port), str(Path(__file__).parent / "streams_script.py"), str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    result: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return result


@pytest.mark.parametrize("case", ["python", "config files", "own loop"])
@pytest.mark.exhaustive
def test_killed_and_resumed_is_uninterrupted(found: dict[str, Any], case: str) -> None:
    assert found[case]["is_exact"]
    assert found[case]["is_equal_on_ranks"]


@pytest.mark.parametrize("case", ["python", "config files"])
def test_each_rank_reads_its_share_again_if_it_is_short(found: dict[str, Any], case: str) -> None:
    assert found[case]["ranks_of_samples"] == [[0], [1]]


def test_a_stream_without_shards_is_split_by_samples(found: dict[str, Any]) -> None:
    first, second = found["without shard"]
    assert (first, second) == ([*range(0, 23, 2)], [*range(1, 23, 2)])
