"""A step is what a hand-written loop does: same weights, bit for bit."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from tests.engine.conftest import Classifier, batches, classifier
from tests.ranks import on_ranks
from tests.toys import assert_equal_weights, quiet
from trainwright.base.dist import get_rank
from trainwright.base.errors import ConfigError
from trainwright.data.seeding import seed_everything
from trainwright.engine import EagerTrainer
from trainwright.engine.state import StepPlan, random_state, set_random_state
from trainwright.trainer.start import plan_of


@pytest.mark.parametrize("grad_acc_steps", [1, 3])
def test_the_weights_are_those_of_a_hand_written_loop(grad_acc_steps: int) -> None:
    ours, theirs = classifier(), classifier()
    data = batches(12)

    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=0.01)
    for window in range(12 // grad_acc_steps):
        for batch in data[window * grad_acc_steps : (window + 1) * grad_acc_steps]:
            (theirs(**batch)["losses"] / grad_acc_steps).backward()
        optimizer.step()
        optimizer.zero_grad()

    torch.manual_seed(1)
    trainer = EagerTrainer(ours, data, torch.optim.AdamW(ours.parameters(), lr=0.01), grad_acc_steps)
    trainer.train(0, 12 // grad_acc_steps)
    assert_equal_weights(ours, theirs)


def test_a_metric_from_inside_the_model_reaches_the_storage() -> None:
    from trainwright.events import get_event_storage

    class Talking(Classifier):
        def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
            if self.training:
                get_event_storage().put_scalar("some_accuracy", (labels == 0).float().mean())
            return super().forward(inputs, labels)

    model = Talking()
    data = batches(3)
    trainer = EagerTrainer(model, data, torch.optim.SGD(model.parameters(), lr=0.1))
    trainer.train(0, 3)
    expected = [(pytest.approx((b["labels"] == 0).float().mean().item()), i) for i, b in enumerate(data)]
    assert trainer.storage.history("some_accuracy").values() == expected


def test_float16_scaling_uses_the_scaler_around_the_update() -> None:
    """The scaler's own arithmetic in float32: scaled losses, unscaled gradients, the weights of a plain loop."""
    ours, theirs = classifier(), classifier()
    data = batches(3)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)  # a power of two: scaling and unscaling are exact
    torch.manual_seed(1)
    EagerTrainer(ours, data, torch.optim.SGD(ours.parameters(), lr=0.1), grad_scaler=scaler).train(0, 3)
    torch.manual_seed(1)
    EagerTrainer(theirs, data, torch.optim.SGD(theirs.parameters(), lr=0.1)).train(0, 3)
    assert_equal_weights(ours, theirs)


def loader(num_batches: int, batch_size: int = 4, *, short: int = 0) -> DataLoader[Any]:
    """The last batch of an epoch has ``short`` samples less."""
    return DataLoader(TensorDataset(torch.arange(num_batches * batch_size - short)), batch_size)


def plan(data: Any, *, num_epochs: int, max_steps: int | None, accumulation: int) -> StepPlan:
    settings: dict[str, Any] = {"num_epochs": num_epochs, "max_steps": max_steps}
    return plan_of(quiet(Path("run"), gradient_accumulation_steps=accumulation, **settings), data)[1]


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
    found = plan(loader(num_batches), num_epochs=3, max_steps=max_steps, accumulation=accumulation)
    total = min(3 * num_batches, max_steps or 100)
    ends = list(windows(num_batches, accumulation, total))
    assert found.total_steps == total
    assert found.num_updates == len(ends)
    assert [found.steps(update) for update in range(len(ends) + 1)] == [0, *ends]
    assert [found.updates(step) for step in (0, *ends)] == list(range(len(ends) + 1))


def test_samples_are_counted_with_the_short_batch_of_each_epoch() -> None:
    class Sampled(DataLoader[Any]):
        """As ours, whose batch sampler knows how many samples an epoch has."""

        def __init__(self) -> None:
            super().__init__(TensorDataset(torch.arange(11)), 4)
            self.batch_sampler.samples_per_epoch = 11  # type: ignore[union-attr]

    found = plan(Sampled(), num_epochs=2, max_steps=None, accumulation=1)
    assert [found.samples(step) for step in range(7)] == [0, 4, 8, 11, 15, 19, 22]


def test_a_loader_without_a_batch_is_refused() -> None:
    with pytest.raises(ConfigError, match="list is empty; it must yield a batch"):
        plan([], num_epochs=1, max_steps=None, accumulation=1)


def uneven() -> str:
    try:
        plan([0] * (3 + get_rank()), num_epochs=1, max_steps=None, accumulation=1)
    except ConfigError as error:
        return str(error)
    return "no error"


def test_lengths_that_differ_between_processes_are_an_error_on_each() -> None:
    for message in on_ranks(uneven):
        assert "its lengths are 3, 4 on the 2 processes; they must be equal" in message


def draw() -> tuple[float, float, float, float]:
    return random.random(), random.gauss(0, 1), float(np.random.randn()), torch.rand(()).item()


def test_a_state_that_is_set_again_continues_there() -> None:
    seed_everything(3)
    draw()  # an odd number of normal draws: half of a pair is kept in the state
    state = random_state()
    expected = [draw() for _ in range(3)]
    seed_everything(9)
    set_random_state(state)
    assert [draw() for _ in range(3)] == expected


@pytest.mark.parametrize("is_used", [False, True])
def test_the_generator_of_a_gpu_is_saved_only_if_this_process_uses_the_gpu(
    is_used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To read its state would begin to use the GPU: half a gigabyte of it."""
    there = [torch.tensor([7], dtype=torch.uint8)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: is_used)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: there[-1])
    monkeypatch.setattr(torch.cuda, "set_rng_state", there.append)
    state = random_state()
    assert ("cuda" in state) is is_used
    set_random_state({**state, "cuda": torch.tensor([9], dtype=torch.uint8)})  # of a run on a GPU
    assert [int(one) for one in there] == ([7, 9] if is_used else [7])
