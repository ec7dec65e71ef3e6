"""Both APIs on two processes: the numbers of a hand-written loop in one process, and shares of streams."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.torchrun import torchrun


def found_by(script: str, folder: Path) -> dict[str, Any]:
    torchrun(Path(__file__).parent / script, folder)
    result: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return result


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return found_by("steps_script.py", tmp_path_factory.mktemp("steps"))


@pytest.fixture(scope="module")
def streams(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return found_by("streams_script.py", tmp_path_factory.mktemp("streams"))


CASES = [
    "config files 1",
    "config files 2",
    "python 1",
    "python 2",
    "graph mode",
    "average",
    "unfrozen",
    "own run_step",
]
CASES += ["own update", "python gan", "config gan", "two backward passes"]


@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_of_a_loop_in_one_process(found: dict[str, Any], case: str) -> None:
    """Uneven batches count by samples, unused parameters are found, gradients of own steps are averaged."""
    assert found[case]["equal_on_all"]
    assert found[case]["difference"] < 1e-6


def test_both_apis_log_the_same_losses(found: dict[str, Any]) -> None:
    assert len(found["python losses"]) == 4
    assert found["config files losses"] == pytest.approx(found["python losses"], abs=1e-6)


def test_logged_losses_are_exchanged_once_per_log_line_epoch_and_checkpoint(found: dict[str, Any]) -> None:
    logged = found["logged"]
    # The first with the state that prepares the memory of checkpoints, the third at the end of an epoch.
    assert logged["calls"] == [1, 4, 3, 2]
    assert len(logged["losses"]) == 10
    assert logged["losses"][0] == pytest.approx(logged["first"], abs=1e-6)  # of both processes


@pytest.mark.parametrize("api", ["python", "config files"])
def test_numbers_that_a_model_returns_are_means_over_the_samples_of_both_processes(
    found: dict[str, Any], api: str
) -> None:
    numbers = found[f"numbers {api}"]
    logged = numbers["logged"]
    sizes = [(3, 1), (2, 4), (1, 5), (4, 4)]
    assert logged["rank"] == pytest.approx([second / (first + second) for first, second in sizes])
    assert logged["loss"] == pytest.approx(logged["total_loss"], rel=1e-6)
    assert len(logged["first"]) == len(sizes)
    (warning,) = [text for text in numbers["warnings"] if "only some" in text]
    assert "only some processes put: rank_only." in warning


@pytest.mark.parametrize("case", ["python", "config files", "own loop"])
def test_killed_and_resumed_is_uninterrupted(streams: dict[str, Any], case: str) -> None:
    assert streams[case]["is_exact"]
    assert streams[case]["is_equal_on_ranks"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", ["python", "config files"])
def test_each_rank_reads_its_share_again_if_it_is_short(streams: dict[str, Any], case: str) -> None:
    assert streams[case]["ranks_of_samples"] == [[0], [1]]


@pytest.mark.exhaustive
def test_a_stream_without_shards_is_split_by_samples(streams: dict[str, Any]) -> None:
    first, second = streams["without shard"]
    assert (first, second) == ([*range(0, 23, 2)], [*range(1, 23, 2)])
