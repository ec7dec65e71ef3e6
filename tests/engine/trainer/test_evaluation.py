"""Evaluations of the Python API on several processes have the results of one."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).with_name("evaluation_ranks.py")


def run(world_size: int, folder: Path) -> list[dict[str, Any]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(world_size)]
    launcher = [*torchrun, "--master-addr", "127.0.0.1", "--master-port", port] if world_size > 1 else []
    done = subprocess.run(
        [sys.executable, *launcher, str(PROGRAM), str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stdout
    return [json.loads((folder / f"{world_size}-{rank}.json").read_text()) for rank in range(world_size)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(1, tmp_path_factory.mktemp("alone"))[0]


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run(request.param, tmp_path_factory.mktemp("ranks"))


def test_results_are_those_of_one_process(alone: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
    # Uneven data, ranks without batches, loaders and lists, and overrides.
    for rank in ranks:
        for name, expected in alone["results"].items():
            found = rank["results"][name]
            if name == "lengths":
                assert found == {length: pytest.approx(of_length, rel=1e-6) for length, of_length in expected.items()}
            else:
                assert found == pytest.approx(expected, rel=1e-6)  # float32 losses of other batches
        assert rank["results"] == ranks[0]["results"]


def test_evaluations_in_training_are_the_same_on_all(alone: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["trained"].keys() == alone["trained"].keys() == {"loss", "accuracy", "f1_score"}
        assert rank["trained"] == ranks[0]["trained"]


def test_an_error_on_one_process_is_an_error_on_all(ranks: list[dict[str, Any]]) -> None:
    for name, failing in {"first": 0, "last": len(ranks) - 1}.items():
        for number, rank in enumerate(ranks):
            message = "ArithmeticError: in the model"
            if number != failing:
                message = f"EvaluationError: Evaluation failed on rank {failing}: {message}"
            assert rank["failures"][name] == message
        assert f"Evaluation failed on rank {failing}: ArithmeticError: in the model" in ranks[failing]["messages"]


def test_no_data_is_the_same_error_on_all(alone: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
    assert "yielded no batch" in alone["failures"]["empty"]
    assert {rank["failures"]["empty"] for rank in ranks} == {alone["failures"]["empty"]}
