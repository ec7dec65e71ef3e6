"""Runs on a sharded model resume bit for bit in the same layout, and exactly in another one."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.sharded_resume import Content, forget, resume_each, train
from tests.ranks import on_ranks
from trainwright.engine import state as engine_state
from trainwright.engine.state import random_state

LAYOUTS: dict[str, tuple[int, list[dict[str, Any]]]] = {
    "stages or shards": (2, [{"pipeline_parallel_size": 2}, {"zero_stage": 3, "batch_size": 2}]),
    "parts": (2, [{"tensor_parallel_size": 2}]),
    "all": (8, [{"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "zero_stage": 2, "batch_size": 2}]),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["stages or shards", *(pytest.param(kind, marks=pytest.mark.exhaustive) for kind in ("parts", "all"))]
)
def test_a_run_resumes_bitwise_in_its_layout_and_passes_from_one_process_to_it_and_back(
    tmp_path: Path, kind: str
) -> None:
    size, layouts = LAYOUTS[kind]
    losses, weights = train(str(tmp_path / "one"), steps=4)
    forget(tmp_path / "one", "4")
    for number in range(len(layouts)):
        shutil.copytree(tmp_path / "one", tmp_path / f"from-one-{number}", symlinks=True)
    ranks = on_ranks(resume_each, str(tmp_path), layouts, world_size=size, timeout=300)
    for number in range(len(layouts)):
        found: Content = {}
        for rank in ranks:
            unbroken, resumed, from_one = rank[number]
            assert resumed[0] == unbroken[0]
            assert all(torch.equal(resumed[1][name], value) for name, value in unbroken[1].items())
            assert from_one[0] == pytest.approx(losses, abs=1e-5)
            found |= from_one[1]
        back = train(str(tmp_path / f"from-one-{number}"), steps=4)[1]
        assert all(torch.equal(back[name], value) for name, value in found.items())
        for name in weights.keys() - {f"blocks.{block}.k.bias" for block in range(4)}:  # their gradients are rounding
            torch.testing.assert_close(back[name], weights[name], atol=1e-4, rtol=1e-4)


def test_random_states_go_to_the_same_share_of_the_data_in_another_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    states = [{**random_state(), "rank": rank} for rank in range(4)]

    def given(layout: list[int], rank: int, share: int, saved: Any) -> Any:
        monkeypatch.setattr(engine_state, "_layout", lambda: layout)
        monkeypatch.setattr(engine_state, "get_rank", lambda: rank)
        monkeypatch.setattr(engine_state, "get_data_parallel_rank", lambda: share)
        found = engine_state._random_state_of({"random": states, **saved})
        return None if found is None else found["rank"]

    stages = {"ranks": {"layout": [4, 2, 2, 1], "data": [0, 1, 0, 1]}}
    assert [given([4, 2, 2, 1], rank, rank % 2, stages) for rank in range(4)] == [0, 1, 2, 3]
    assert [given([4, 1, 2, 2], rank, rank // 2, stages) for rank in range(4)] == [0, 0, 1, 1]  # parts draw alike
    assert [given([3], rank, rank, stages) for rank in range(3)] == [0, 1, None]
    assert [given([4], rank, rank, {}) for rank in range(4)] == [0, 1, 2, 3]  # an earlier version
