"""Tensor parallel through both APIs: the losses, norms and evaluations of one process."""

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.layout_runs import train, train_on_ranks

Run = tuple[str, dict[str, Any]]

OF_TWO: list[Run] = [
    ("files", {"updates": 20}),
    ("objects", {"updates": 3, "accumulation": 2, "layout": {"sequence_parallel": True}}),
    ("objects", {"updates": 3, "tied": False, "recompute": True}),
]
OF_FOUR: list[Run] = [
    ("files", {"layout": {"zero_stage": 3}}),
    ("objects", {"layout": {"zero_stage": 1, "sequence_parallel": True}}),
    ("files", {"layout": {"pipeline_parallel_size": 2, "sequence_parallel": True}}),
    ("objects", {"layout": {"pipeline_parallel_size": 2}}),
]


@pytest.mark.parametrize(("world_size", "runs"), [(2, OF_TWO), (4, OF_FOUR)], ids=["2", "4"])
def test_tensor_parallel_processes_train_as_one(tmp_path: Path, world_size: int, runs: list[Run]) -> None:
    runs = [
        (api, {"updates": 3, "accumulation": 2 if world_size > 2 else 1, **settings} | {"layout": layout_of(settings)})
        for api, settings in runs
    ]
    found = train_on_ranks(tmp_path, runs, world_size=world_size)
    for number, (api, settings) in enumerate(runs):
        expected = train(api, tmp_path / f"alone{number}", **{k: v for k, v in settings.items() if k != "layout"})
        for rank in found:
            run, case = rank[number], f"{api} {settings}"
            assert run["losses"] == pytest.approx(expected["losses"], abs=1e-5), case
            assert run["norms"] == pytest.approx(expected["norms"], abs=1e-5), case
            assert run["results"] == pytest.approx(expected["results"], rel=1e-6), case


def layout_of(settings: dict[str, Any]) -> dict[str, Any]:
    return {"tensor_parallel_size": 2, **settings.get("layout", {})}
