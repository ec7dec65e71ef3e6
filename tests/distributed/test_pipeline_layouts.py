"""Pipelines through both APIs, alone and with data and tensor parallel: the losses and norms of one process."""

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.layout_runs import assert_equal_runs, train, train_on_ranks

Run = tuple[str, dict[str, Any]]


def runs_of(updates: int, **layouts: dict[str, Any]) -> list[Run]:
    """With accumulation, clipping and tied weights; the APIs in turn."""
    found: list[Run] = []
    for number, layout in enumerate(layouts.values()):
        settings: dict[str, Any] = {"accumulation": 3, "updates": updates, "recompute": number == 0}
        found.append(
            (("objects", "files")[number % 2], {**settings, "layout": {"pipeline_parallel_size": 2, **layout}})
        )
    return found


def assert_as_one_process(tmp_path: Path, runs: list[Run], world_size: int) -> None:
    ranks = train_on_ranks(tmp_path, runs, world_size=world_size, timeout=300)
    for number, (api, settings) in enumerate(runs):
        expected = train(api, tmp_path / f"alone{number}", **{k: v for k, v in settings.items() if k != "layout"})
        for rank in ranks:
            assert_equal_runs(rank[number], expected)


def test_four_processes(tmp_path: Path) -> None:
    runs = runs_of(3, zero3={"zero_stage": 3}, zero2={"zero_stage": 2, "pipeline_schedule": "ZBVZeroBubble"})
    assert_as_one_process(tmp_path, runs, 4)


@pytest.mark.exhaustive
def test_every_schedule_for_twenty_updates(tmp_path: Path) -> None:
    schedules = ("GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble")
    assert_as_one_process(tmp_path, runs_of(20, **{name: {"pipeline_schedule": name} for name in schedules}), 2)


@pytest.mark.exhaustive
def test_four_processes_for_twenty_updates(tmp_path: Path) -> None:
    runs = runs_of(
        20, copies={}, zero2={"zero_stage": 2}, zero3={"zero_stage": 3}, four={"pipeline_parallel_size": 4},
        tensor={"tensor_parallel_size": 2},
    )  # fmt: skip
    assert_as_one_process(tmp_path, runs, 4)


@pytest.mark.exhaustive
def test_stages_data_ranks_and_tensor_ranks_for_twenty_updates(tmp_path: Path) -> None:
    tensor = {"tensor_parallel_size": 2}
    runs = runs_of(
        20, zero3={**tensor, "zero_stage": 3}, copies=tensor, hybrid={"zero_stage": 2, "replicate_size": 2},
    )  # fmt: skip
    assert_as_one_process(tmp_path, runs, 8)
