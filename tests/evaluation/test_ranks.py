import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


def start(**environment: object) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("ranks.py"))],
        env={
            **os.environ,
            "PYTHONPATH": str(REPOSITORY),
            "OMP_NUM_THREADS": "1",
            **{k: str(v) for k, v in environment.items()},
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def results() -> tuple[dict, list[dict]]:
    """What one process says, and what each of two says."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    two = {"WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    processes = [start(RANK=0, WORLD_SIZE=1), start(RANK=0, **two), start(RANK=1, **two)]
    said = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=120)
            assert process.returncode == 0, err
            said.append(json.loads(out.splitlines()[-1]))
    finally:
        for process in processes:
            process.kill()
    return said[0], said[1:]


def test_two_ranks_have_the_figures_of_one(results):
    alone, ranks = results
    for rank in ranks:
        assert rank["figures"].keys() == alone["figures"].keys()
        for length, figures in alone["figures"].items():
            assert rank["figures"][length] == figures


def test_the_evaluator_sees_every_sample_once_in_the_order_of_the_data_set(results):
    for said in [results[0], *results[1]]:
        for length, figures in said["figures"].items():
            assert figures["order"] == pytest.approx([i / int(length) for i in range(int(length))])


def test_eval_iter_counts_batches_of_each_rank(results):
    assert results[0]["limited"] == 3
    assert [rank["limited"] for rank in results[1]] == [6, 6]


def test_an_error_on_one_rank_is_an_error_on_all(results):
    first, second = (rank["failures"] for rank in results[1])
    assert first["evaluator"] == "ArithmeticError: in the evaluator"
    assert second["evaluator"] == "EvaluationError: Evaluation failed on rank 0: ArithmeticError: in the evaluator"
    assert first["get_batch"] == "EvaluationError: Evaluation failed on rank 1: ArithmeticError: in get_batch"
    assert second["get_batch"] == "ArithmeticError: in get_batch"
    assert "empty" in first["empty"]
    assert first["empty"] == second["empty"] == results[0]["failures"]["empty"]
