"""What is seen in the first updates."""

import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from trainwright import Trainer, TrainingConfig
from trainwright.engine.check.copies import quiet
from trainwright.engine.check.observed import NUM_UPDATES, SetUp


class Branches(nn.Module):
    """``unused`` is not called; ``zero`` has a gradient of 0."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused, self.zero = nn.Linear(4, 2), nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, inputs: Any) -> Any:
        return self.used(inputs) + 0 * self.zero(inputs)


def test_gradients_memory_and_times(tmp_path: Path) -> None:
    data = TensorDataset(torch.randn(64, 4), torch.randint(2, (64,)))
    config = TrainingConfig(output_dir=str(tmp_path / "run"), batch_size=8, num_epochs=2)
    trainer = Trainer(Branches(), config, data)
    with quiet():
        seen = SetUp(trainer, tmp_path, end=time.perf_counter() + 60).observed
    assert seen.with_gradient == {"used.weight", "used.bias"}
    assert seen.with_zero_gradient == {"zero.weight", "zero.bias"}
    assert seen.changed >= {"used.weight", "used.bias"}
    assert seen.num_steps == len(seen.seconds) == len(seen.losses) == NUM_UPDATES
    parameters = 3 * (4 * 2 + 2) * 4  # bytes
    assert seen.model_bytes == seen.gradient_bytes == parameters
    assert seen.optimizer_bytes >= 2 * parameters * 2 / 3  # Adam's two moments, not of what has no gradient
    assert seen.saved_bytes >= 8 * 4 * 4  # the inputs
