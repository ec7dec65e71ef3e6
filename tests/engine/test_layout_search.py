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
    layout = Layout(data=4, tensor=2, replicate=2, zero_stage=1, sequence_parallel=True)
    config, dist = with_layout(config, layout), with_layout(cfg, layout).train.dist
    assert (
        (config.replicate_size, config.sequence_parallel) == (dist.replicate_size, dist.sequence_parallel) == (2, True)
    )


def test_copies_of_the_model_are_those_of_machines() -> None:
    layouts = [layout for layout in layouts_of(64) if layout.zero_stage == 3 and layout.pipeline == 1]
    found = [(layout.tensor, layout.replicate, layout.shard) for layout in layouts if not layout.sequence_parallel]
    assert found[:4] == [(1, 8, 8), (1, 1, 64), (2, 8, 4), (2, 1, 32)]
    assert found[-1] == (8, 1, 8)
    assert {layout.sequence_parallel for layout in layouts if layout.tensor > 1} == {False, True}


@pytest.mark.parametrize("world_size", [4, 16])
def test_all_layouts_of_the_search_can_be_configured(world_size: int) -> None:
    for layout in layouts_of(world_size):
        names = ("tensor_parallel_size", "pipeline_parallel_size", "replicate_size", "zero_stage", "sequence_parallel")
        config = with_layout(TrainingConfig(output_dir="x"), layout)
        assert Layout.of({name: getattr(config, name) for name in names}, world_size) == layout


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
