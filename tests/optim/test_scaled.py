"""A skipped first step in float16 leaves no uninitialized momentum behind."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from trainwright import Trainer, TrainingConfig
from trainwright.optim.scaled import ScaledStep


def fill_freed_memory() -> None:
    """What torch allocates next holds large numbers."""
    blocks = [torch.full((64, 64), 1e30) for _ in range(64)]
    del blocks


def step_twice(optimizer: torch.optim.Optimizer, weight: nn.Parameter) -> None:
    """A step with infinite gradients, which is skipped, and one with gradients of 1."""
    scaler = torch.amp.GradScaler("cpu")
    step = ScaledStep(scaler, optimizer)
    for factor in (float("inf"), 1.0):
        fill_freed_memory()
        scaler.scale((weight * factor).sum()).backward()
        step()
        scaler.update()
        optimizer.zero_grad()


@pytest.mark.parametrize("settings", [{"momentum": 0.9}, {"momentum": 0.9, "dampening": 0.5}, {}], ids=str)
def test_fused_sgd_after_a_skipped_first_step_is_a_first_step(settings: dict[str, Any]) -> None:
    weights = [nn.Parameter(torch.ones(64, 64)) for _ in range(2)]
    for weight, fused in zip(weights, (True, False), strict=True):
        step_twice(torch.optim.SGD([weight], lr=0.1, fused=fused, **settings), weight)
    assert torch.equal(weights[0], weights[1])


def test_after_its_first_step_fused_sgd_is_given_the_flag_again() -> None:
    weight = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9, fused=True)
    step_twice(optimizer, weight)
    assert optimizer._step_supports_amp_scaling
    assert not ScaledStep(torch.amp.GradScaler("cpu"), optimizer)._lacks_momentum


class OwnStep(Trainer):
    def train_step(self, model: Any, inputs: Any) -> dict[str, Any]:
        loss = self.compute_loss(model, inputs)
        self.backward(loss)
        self.step(self.optimizer)
        return {"step_loss": loss.detach()}


@pytest.mark.parametrize("trainer_class", [Trainer, OwnStep])
@pytest.mark.parametrize("non_finite", ["warn", "skip"])
def test_training_in_fp16_with_momentum_survives_an_overflow_in_its_first_update(
    trainer_class: type[Trainer], non_finite: str, tmp_path: Path
) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    x = torch.randn(32, 64) * 30  # gradients of the first layer overflow at a scale of 65536
    config = TrainingConfig(
        output_dir=str(tmp_path), num_epochs=2, batch_size=8, learning_rate=1e-4, mixed_precision="fp16",
        save_enabled=False, optimizer={"name_": "SGD", "momentum": 0.9}, non_finite=non_finite,
    )  # fmt: skip
    trainer = trainer_class(model, config, TensorDataset(x, (x[:, 0] > 0).long()))
    fill_freed_memory()
    trainer.train()
    assert trainer._grad_scaler is not None
    assert trainer._grad_scaler.get_scale() < 65536  # there was an overflow
    assert max(float(p.detach().abs().max()) for p in model.parameters()) < 10
