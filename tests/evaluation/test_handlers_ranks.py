"""Two processes with uneven shares have the figures of one."""

import json
import os
import socket
import subprocess
from pathlib import Path

import pytest

from tests.fork_server import python

REPOSITORY = Path(__file__).parents[3]


def start(**environment: object) -> subprocess.Popen:
    settings = {"PYTHONPATH": REPOSITORY, "OMP_NUM_THREADS": 1, **environment}
    return subprocess.Popen(
        [python(), "-W", "error", str(Path(__file__).with_name("metric_ranks.py"))],
        env={**os.environ, **{key: str(value) for key, value in settings.items()}},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def said() -> tuple[dict, list[dict]]:
    """What one process says, and what each of two says."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    two = {"WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    processes = [start(RANK=0, WORLD_SIZE=1), start(RANK=0, **two), start(RANK=1, **two)]
    results = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=120)
            assert process.returncode == 0, err
            results.append(json.loads(out.splitlines()[-1]))
    finally:
        for process in processes:
            process.kill()
    return results[0], results[1:]


@pytest.mark.parametrize("cuts", ["uneven", "one batch"])
@pytest.mark.parametrize("kind", ["classes", "texts", "generated", "own"])
def test_handlers_have_one_value_on_any_number_of_ranks(said, cuts, kind):
    alone, ranks = said
    for rank in ranks:
        assert rank[cuts][kind] == alone["one batch"][kind]  # equal, bit by bit: the order is that of the data set


@pytest.mark.parametrize("cuts", ["uneven", "one batch"])
@pytest.mark.parametrize("kind", ["torch", "indices", "numbers"])
def test_torchmetrics_have_one_value_on_any_number_of_ranks(said, cuts, kind):
    alone, ranks = said
    for rank in ranks:
        # torchmetrics sums in float32, in an order that depends on the ranks.
        assert rank[cuts][kind] == pytest.approx(alone["one batch"][kind], rel=1e-5)


def test_a_default_that_does_not_fit_is_off_on_all_ranks(said):
    assert all(
        one[cuts]["default that does not fit"] == {} for one in (said[0], *said[1]) for cuts in ("uneven", "one batch")
    )


def test_a_default_that_fits_the_batches_of_one_rank_only_is_off_on_both(said):
    assert {str(one["default that fits one rank"]) for one in (said[0], *said[1])} == {"{}"}


def test_a_train_copy_is_read_by_one_rank_without_the_other(said):
    assert said[1][0]["train copy"] == said[0]["train copy"]


def test_no_samples_on_any_rank_are_an_error_on_all(said):
    assert {one["empty"] for one in (said[0], *said[1])} == {"metric Accuracy has seen no samples."}


def test_samples_of_tensor_parallel_ranks_count_once(said):
    alone, ranks = said
    assert alone["tensor ranks"]["counts"][-1] == 30
    assert [rank["tensor ranks"] for rank in ranks] == [alone["tensor ranks"]] * 2
