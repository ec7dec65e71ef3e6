"""Optimizers and schedules that are attributes of a trainer class of the user's own are saved and resumed."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from trainwright import Trainer, TrainingConfig

# B batch, F features.
DATA = TensorDataset(torch.randn(24, 4, generator=torch.Generator().manual_seed(1)))


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.discriminator = nn.Linear(4, 1)

    def forward(self, x_BF: Tensor) -> Tensor:
        return self.layer(x_BF)


class Gan(Trainer):
    """With the discriminator in the model, and a second one that only the trainer holds."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        torch.manual_seed(3)
        self.critic = nn.Linear(4, 1)
        self.optimizer_d = torch.optim.Adam(self.model.discriminator.parameters(), lr=0.01)
        self.optimizer_c = torch.optim.SGD(self.critic.parameters(), lr=0.01, momentum=0.9)
        self.schedule_d = torch.optim.lr_scheduler.ExponentialLR(self.optimizer_d, 0.9)

    def prepare_input_batch(self, batch: Any) -> Any:
        return batch[0], batch[0]

    def train_step(self, model: Any, inputs: Any) -> dict[str, Any]:
        x, _ = inputs
        fake = model(x)
        for judge, optimizer in ((self.model.discriminator, self.optimizer_d), (self.critic, self.optimizer_c)):
            self.backward(F.softplus(judge(fake.detach())).mean() + F.softplus(-judge(x)).mean())
            self.step(optimizer)
        self.schedule_d.step()
        self.model.discriminator.requires_grad_(False)
        loss = F.softplus(-self.model.discriminator(fake)).mean()
        self.backward(loss)
        self.step(self.optimizer)
        self.model.discriminator.requires_grad_(True)
        return {"step_loss": loss.detach()}


def run(folder: Path, num_epochs: int, kind: type[Trainer] = Gan, **settings: Any) -> Any:
    torch.manual_seed(0)
    model = Generator()
    config = TrainingConfig(
        output_dir=folder, num_epochs=num_epochs, lr_scheduler_type=None, progress_bar=False, tensorboard=None,
        metrics=None, eval_strategy="no", early_stopping=None, **settings,
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.layer.parameters(), lr=0.02)
    trainer = kind(model, config, train_dataset=DATA, optimizer=optimizer)
    trainer.train()
    return trainer


def test_a_resumed_run_has_the_state_of_every_optimizer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    straight = run(tmp_path / "straight", 4)
    run(tmp_path / "resumed", 2)
    caplog.clear()
    resumed = run(tmp_path / "resumed", 4, resume_from_checkpoint=True)
    for ours, theirs in zip(resumed.model.parameters(), straight.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(resumed.critic.weight, straight.critic.weight)
    assert resumed.schedule_d.get_last_lr() == straight.schedule_d.get_last_lr()
    assert "other optimizers" not in caplog.text


def test_an_optimizer_that_only_one_of_both_has_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Renamed(Gan):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            self.second = self.optimizer_d
            del self.schedule_d, self.optimizer_d

        def train_step(self, model: Any, inputs: Any) -> dict[str, Any]:
            loss = model(inputs[0]).square().mean()
            self.backward(loss)
            self.step(self.optimizer)
            return {"step_loss": loss.detach()}

    run(tmp_path, 1)
    caplog.clear()
    run(tmp_path, 2, Renamed, resume_from_checkpoint=True)
    assert "Saved state that is not used: optimizer_d, schedule_d. Without saved state: second." in caplog.text
