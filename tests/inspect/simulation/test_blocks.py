"""Runs of equal blocks in a model."""

from collections.abc import Sequence

from torch import nn

from trainwright.inspect.simulation.blocks import Run, containers_of, remove, runs_of


def linears(sizes: Sequence[int]) -> list[nn.Module]:
    return [nn.Linear(4, size) for size in sizes]


def test_equal_blocks_between_others() -> None:
    model = nn.ModuleList(linears([8, *[4] * 20, 8]))
    assert runs_of(model, model) == [Run(first=1, period=1, units=20)]
    assert runs_of(nn.ModuleList(linears([4] * 19)), model) == []


def test_blocks_that_alternate() -> None:
    model = nn.Sequential(*[block for _ in range(20) for block in (nn.Linear(4, 4), nn.ReLU())])
    assert runs_of(model, model) == [Run(first=0, period=2, units=20)]


def test_blocks_that_differ() -> None:
    blocks = linears([4] * 40)
    blocks[20].requires_grad_(False)
    model = nn.ModuleList(blocks)
    assert [run.first for run in runs_of(model, model)] == [0]
    rates = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Dropout(i / 100)) for i in range(40))
    assert runs_of(rates, rates) == [Run(first=1, period=1, units=39)]  # the first one drops nothing


def test_blocks_may_know_their_position() -> None:
    blocks = linears([4] * 20)
    for i, block in enumerate(blocks):
        block.layer_idx = i  # type: ignore[assignment]
    model = nn.ModuleList(blocks)
    assert runs_of(model, model)[0].units == 20
    blocks[3].layer_idx = 9  # type: ignore[assignment]
    assert runs_of(model, model) == []


def test_blocks_that_share_a_parameter_are_no_run() -> None:
    blocks = linears([4] * 24)
    for block in blocks[1:]:
        block.weight = blocks[0].weight
    model = nn.ModuleList(blocks)
    assert runs_of(model, model) == []


def test_a_model_that_chooses_blocks_by_position_is_left_alone() -> None:
    model = nn.Module()
    model.blocks = nn.ModuleList(linears([4] * 24))
    assert [name for name, _ in containers_of(model, model)] == ["blocks"]
    model.out_indices = [5, 11, 23]  # type: ignore[assignment]
    assert [*containers_of(model, model)] == []


def test_removed_blocks_leave_a_list_with_consecutive_names() -> None:
    model = nn.ModuleList(linears([1, 2, 3, 4, 5]))
    remove(model, range(1, 4), None)
    assert [block.out_features for block in model] == [1, 5]
    assert [*model._modules] == ["0", "1"]
