"""Models that give their loss in different ways, on 50 samples: the last batch of an epoch is a short one.

B batch, F features, C classes.
"""

import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.toys import Samples, pairs, quiet
from trainwright import TrainingConfig
from trainwright.data import EpochSampler

PAIRS = pairs()
INPUTS, LABELS = PAIRS.tensors


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))

    def forward(self, inputs: Tensor) -> Any:
        return self.body(inputs)


class ReturnsLosses(Net):
    def forward(self, inputs: Tensor, labels: Tensor) -> Any:
        logits = self.body(inputs)
        return {"logits": logits, "ce_loss": F.cross_entropy(logits, labels), "z_loss": 1e-3 * logits.square().mean()}


NAMED = Samples(inputs=INPUTS, labels=LABELS)


def pair_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def make(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def config(folder: Path, **settings: Any) -> TrainingConfig:
    given = {"dataloader_drop_last": False, "save_freq": 0, "learning_rate": 0.01, "tensorboard": {}, **settings}
    return quiet(folder, **given)


def by_hand(model: nn.Module, loss_of: Any, *, accumulation: int = 1, epochs: int = 2, batch: int = 8) -> nn.Module:
    """The loop that a user would write, over the same order of samples."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
    order = iter(EpochSampler(PAIRS, batch, shuffle=True, seed=42))
    per_epoch = math.ceil(50 / batch)
    torch.manual_seed(42)
    for _ in range(epochs):
        for first in range(0, per_epoch, accumulation):
            window = min(accumulation, per_epoch - first)
            for _ in range(window):
                indices = next(order)
                (loss_of(model, INPUTS[indices], LABELS[indices]) / window).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model
