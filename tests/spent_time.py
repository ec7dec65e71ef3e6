"""A clock that goes only where a test spends time, and trainings whose parts take so long."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from trainwright.engine import EagerTrainer


class Clock:
    """Goes on only where a test spends time: what is measured is exact, on the busiest machine."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


CLOCK = Clock()


def spend(seconds: float) -> None:
    CLOCK.now += seconds


about = partial(pytest.approx, rel=1e-6)


class Net(nn.Module):
    def __init__(self, forward_s: float = 0.0) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self._forward_s = forward_s

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        spend(self._forward_s)
        return {"loss": self.layer(x).pow(2).mean()}


class Batches:
    """Three batches, each of which takes ``seconds`` to get."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._seconds = seconds

    def __iter__(self) -> Any:
        for _ in range(3):
            spend(self._seconds)
            yield {"x": torch.ones(2, 4)}


def eager(forward_s: float = 0.0, data_s: float = 0.0, optimizer: Any = torch.optim.SGD) -> EagerTrainer:
    net = Net(forward_s)
    return EagerTrainer(net, Batches(data_s), optimizer(net.parameters(), lr=0.01))
