"""Which losses are spikes, and what is reported of them."""

import logging
import random
from typing import Any

import pytest
import torch

from trainwright.engine.loop import TrainerBase
from trainwright.events.smoothing import HistoryBuffer
from trainwright.hooks import FiniteCheck
from trainwright.hooks.nan_check import largest_spike


def history(values: list[float]) -> HistoryBuffer:
    found = HistoryBuffer()
    found.extend(values, list(range(len(values))))
    return found


def noisy(number: int, level: float = 1.0, spread: float = 0.2) -> list[float]:
    generator = random.Random(0)
    return [level + generator.gauss(0, spread) for _ in range(number)]


def test_the_largest_value_above_the_limit() -> None:
    values = [*noisy(100), 1.0, 9.0, 1.0, 18.2, 1.1]
    spike = largest_spike(history(values), 100)
    assert spike is not None
    assert (spike.iteration, spike.value, spike.count, spike.window) == (103, 18.2, 2, 100)
    assert str(spike) == f"18.2, {18.2 / spike.typical:.3g} times the median of the last 100"


@pytest.mark.parametrize(
    "values",
    [
        [*noisy(100), 2.4],  # within three times the median
        [*noisy(25), 50.0],  # too few values to compare with
        [*noisy(100, spread=1.0), 5.0],  # a loss with this much noise
        [0.0] * 100 + [0.1],  # a loss that is mostly 0 has no scale
        [*noisy(100), float("nan"), float("inf")],  # not finite: another message
        noisy(100),
    ],
)
def test_what_is_no_spike(values: list[float]) -> None:
    assert largest_spike(history(values), min(100, len(values) - 1)) is None


def test_earlier_spikes_and_losses_that_are_not_finite_do_not_hide_one() -> None:
    values = noisy(100)
    for place in range(0, 100, 5):
        values[place] = 1000.0 if place % 2 else float("nan")
    assert largest_spike(history([*values, 30.0]), 100) is not None


def test_of_losses_below_zero() -> None:
    spike = largest_spike(history([*noisy(50, level=-3.0), 9.0]), 50)
    assert spike is not None
    assert str(spike) == f"9, the median of the last 50 is {spike.typical:.4g}"


class Spiking(TrainerBase):
    """Has the loss ``spikes[iter]``, or about 1."""

    def __init__(self, spikes: dict[int, float]) -> None:
        super().__init__()
        self.spikes, self.values = spikes, noisy(1000)
        self.register_hooks([FiniteCheck(period=10, policy="warn")])

    def run_step(self) -> None:
        self.storage.put_scalar("total_loss", torch.tensor(self.spikes.get(self.iter, self.values[self.iter])))


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_each_spike_is_reported_once_and_kept_as_a_text(caplog: pytest.LogCaptureFixture) -> None:
    trainer = Spiking({64: 30.0, 67: 20.0, 90: 25.0})
    trainer.train(0, 100)
    found = messages(caplog)
    assert [text.partition(":")[0] for text in found] == ["Update 65", "Update 91"]
    assert "30, " in found[0]
    assert "It is the largest of 2 since the last check." in found[0]
    texts: list[Any] = trainer.storage.media()
    assert [(item.name, item.iteration, item.content) for item in texts] == [
        ("loss_spikes", 69, found[0]),
        ("loss_spikes", 99, found[1]),
    ]


def test_after_ten_messages_there_are_no_more(caplog: pytest.LogCaptureFixture) -> None:
    Spiking(dict.fromkeys(range(50, 400, 10), 40.0)).train(0, 400)
    found = messages(caplog)
    assert len(found) == 11
    assert found[-1].endswith("no longer reported.")
