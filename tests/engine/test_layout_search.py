"""Layouts that fit, best first."""

from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from tests.engine.test_estimation import MLP
from trainwright import Trainer, TrainingConfig, get_config
from trainwright.engine import fitting_layouts
from trainwright.engine.layout_search import layouts_of, with_layout
from trainwright.parallel.layout import Layout


@pytest.mark.parametrize("world_size", [1, 2, 6, 64, 1000])
def test_layouts_use_all_processes_and_are_all_different(world_size: int) -> None:
    layouts = [*layouts_of(world_size)]
    assert {layout.world_size for layout in layouts} == {world_size}
    assert len(set(layouts)) == len(layouts)
    assert layouts[0] == Layout(data=world_size, replicate=world_size)


def test_the_sizes_are_those_that_both_apis_read() -> None:
    layout = Layout(data=2, tensor=4, pipeline=2, zero_stage=3)
    config = with_layout(TrainingConfig(output_dir="x"), layout)
    names = ("data_parallel_size", "tensor_parallel_size", "pipeline_parallel_size", "zero_stage")
    assert [getattr(config, name) for name in names] == [2, 4, 2, 3]
    cfg: Any = {"train": get_config("common/train.py").train}
    found = with_layout(cfg, layout).train
    assert [found.dist[name] for name in names[:3]] == [2, 4, 2]
    assert dict(found.zero_optimization) == {"enabled": True, "stage": 3}
    assert not with_layout(cfg, Layout(data=2, replicate=2)).train.zero_optimization.enabled


def test_those_that_fit_come_first(tmp_path: Any) -> None:
    data = TensorDataset(torch.zeros(64, 256), torch.zeros(64, dtype=torch.long))
    config = TrainingConfig(output_dir=str(tmp_path), batch_size=4, loss="CrossEntropyLoss")

    def find(memory: int) -> Any:
        build = lambda config: Trainer(MLP(), config, train_dataset=data)  # noqa: E731
        return fitting_layouts(build, config, world_size=2, memory=memory, wanted=1)

    enough = find(2**30)
    assert len(enough) == 1
    assert enough[0].fits(2**30)
    assert enough[0].layout == Layout(data=2, replicate=2)
    none = find(2**20)
    assert not any(candidate.fits(2**20) for candidate in none)
    assert none[0].estimate is None
    assert none[0].state_bytes > 4 * 4 * 256 * 1024  # parameters, gradients and two states, of the first layer alone
