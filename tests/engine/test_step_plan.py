"""Which steps form which update: compared with a walk over every step."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.ranks import on_ranks
from trainwright.config.errors import ConfigError
from trainwright.engine.step_plan import make_plan
from trainwright.parallel.dist import get_rank


def loader(num_batches: int, batch_size: int = 4, *, short: int = 0) -> DataLoader[Any]:
    """The last batch of an epoch has ``short`` samples less."""
    return DataLoader(TensorDataset(torch.arange(num_batches * batch_size - short)), batch_size)


def windows(steps_per_epoch: int, accumulation: int, total: int) -> Iterator[int]:
    """The number of steps after each update: windows end with the epoch, and with the run."""
    in_window = 0
    for step in range(1, total + 1):
        in_window += 1
        if in_window == accumulation or step % steps_per_epoch == 0 or step == total:
            in_window = 0
            yield step


@pytest.mark.parametrize("max_steps", [None, 1, 8, 100])
@pytest.mark.parametrize("accumulation", [1, 2, 3, 9])
@pytest.mark.parametrize("num_batches", [1, 4, 7])
def test_steps_and_updates_are_those_of_a_walk(num_batches: int, accumulation: int, max_steps: int | None) -> None:
    plan = make_plan(loader(num_batches), num_epochs=3, max_steps=max_steps, accumulation=accumulation)
    total = min(3 * num_batches, max_steps or 100)
    ends = list(windows(num_batches, accumulation, total))
    assert plan.total_steps == total
    assert plan.num_updates == len(ends)
    assert [plan.steps(update) for update in range(len(ends) + 1)] == [0, *ends]
    assert [plan.updates(step) for step in (0, *ends)] == list(range(len(ends) + 1))


def test_samples_are_counted_with_the_short_batch_of_each_epoch() -> None:
    class Sampled(DataLoader[Any]):
        """As ours, whose batch sampler knows how many samples an epoch has."""

        def __init__(self) -> None:
            super().__init__(TensorDataset(torch.arange(11)), 4)
            self.batch_sampler.samples_per_epoch = 11  # type: ignore[union-attr]

    plan = make_plan(Sampled(), num_epochs=2, max_steps=None, accumulation=1)
    assert [plan.samples(step) for step in range(7)] == [0, 4, 8, 11, 15, 19, 22]


def test_a_loader_without_a_batch_is_refused() -> None:
    with pytest.raises(ConfigError, match="list is empty; it must yield a batch"):
        make_plan([], num_epochs=1, max_steps=None, accumulation=1)


def uneven() -> str:
    try:
        make_plan([0] * (3 + get_rank()), num_epochs=1, max_steps=None, accumulation=1)
    except ConfigError as error:
        return str(error)
    return "no error"


def test_lengths_that_differ_between_processes_are_an_error_on_each() -> None:
    for message in on_ranks(uneven):
        assert "its lengths are 3, 4 on the 2 processes; they must be equal" in message
