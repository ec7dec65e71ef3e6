"""Blocks that are compiled alone, in each layout: the numbers are those of one process."""

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.layout_runs import assert_equal_runs, train, train_on_ranks


@pytest.mark.compile
@pytest.mark.exhaustive
def test_compiled_blocks_give_the_numbers_of_one_process(tmp_path: Path) -> None:
    layouts: list[dict[str, Any]] = [{}, {"zero_stage": 3}, {"tensor_parallel_size": 2}]
    expected = train("objects", tmp_path / "alone")
    calls = [("objects", {"layout": layout | {"compile_blocks": True}}) for layout in layouts]
    for found in train_on_ranks(tmp_path, calls, world_size=2, timeout=240):
        for run in found:
            assert_equal_runs(run, expected)
