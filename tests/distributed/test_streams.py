"""Streams and the loop of the user's own on two processes: shares, uneven ends, and exact resume."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.torchrun import torchrun


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("streams")
    torchrun(Path(__file__).parent / "streams_script.py", folder)
    result: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return result


@pytest.mark.parametrize("case", ["python", "config files", "own loop"])
@pytest.mark.exhaustive
def test_killed_and_resumed_is_uninterrupted(found: dict[str, Any], case: str) -> None:
    assert found[case]["is_exact"]
    assert found[case]["is_equal_on_ranks"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", ["python", "config files"])
def test_each_rank_reads_its_share_again_if_it_is_short(found: dict[str, Any], case: str) -> None:
    assert found[case]["ranks_of_samples"] == [[0], [1]]


@pytest.mark.exhaustive
def test_a_stream_without_shards_is_split_by_samples(found: dict[str, Any]) -> None:
    first, second = found["without shard"]
    assert (first, second) == ([*range(0, 23, 2)], [*range(1, 23, 2)])
