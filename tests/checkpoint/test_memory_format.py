"""A resumed run whose parameters lie in another order in memory than their indices."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from trainwright import Trainer, TrainingConfig


def train(folder: Path, kind: str, **settings: Any) -> nn.Module:
    torch.manual_seed(0)
    images = torch.randn(64, 3, 8, 8)
    data = TensorDataset(images, images.mean((1, 2, 3)).gt(0).long())
    model = nn.Sequential(nn.Conv2d(3, 9, 3), nn.ReLU(), nn.Conv2d(9, 4, 3, groups=1), nn.Flatten(), nn.Linear(64, 2))
    model = model.to(memory_format=torch.channels_last)
    config = TrainingConfig(
        output_dir=str(folder), batch_size=4, num_epochs=1, optimizer=kind, learning_rate=1e-2, metrics=[], **settings
    )
    Trainer(model, config, train_dataset=data).train()
    return model


@pytest.mark.exhaustive(every=2)
@pytest.mark.parametrize("kind", ["adam", "adamw", "sgd", "adagrad"])
def test_channels_last_goes_on_bit_for_bit(tmp_path: Path, kind: str) -> None:
    settings: dict[str, Any] = {"optimizer": {"name_": kind, "momentum": 0.9}} if kind == "sgd" else {}
    name = settings.pop("optimizer", kind)
    uninterrupted = train(tmp_path / "uninterrupted", name, save_steps=8)
    resumed = train(tmp_path / "resumed", name, resume_from_checkpoint=str(tmp_path / "uninterrupted/checkpoints/08"))
    for left, right in zip(uninterrupted.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(left, right)
