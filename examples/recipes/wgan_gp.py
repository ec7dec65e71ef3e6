"""WGAN with gradient penalty (Gulrajani et al. 2017) on handwritten digits: the critic steps more often."""

import sys
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from trainwright import Trainer, TrainingConfig

NOISE, PENALTY, CRITIC_STEPS = 16, 10.0, 5


class Networks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(NOISE, 64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh())
        self.critic = nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))


def gradient_penalty(critic: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    share = torch.rand(len(real), 1)
    between = (share * real + (1 - share) * fake).requires_grad_()
    (gradient,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    return (gradient.norm(dim=1) - 1).square().mean()


class WassersteinGan(Trainer):
    def train_step(self, model: Any, inputs: Any) -> dict[str, Tensor]:
        (real,) = inputs
        fake = model.generator(torch.randn(len(real), NOISE))
        distance = model.critic(fake.detach()).mean() - model.critic(real).mean()
        loss = distance + PENALTY * gradient_penalty(model.critic, real, fake.detach())
        self.backward(loss, optimizer="critic")
        self.step("critic")
        if self.iter % CRITIC_STEPS == 0:
            self.backward(-model.critic(fake).mean(), optimizer="generator")
            self.step("generator")
        return {"step_loss": loss.detach()}


def make(folder: str, num_epochs: int = 3, **settings: Any) -> Trainer:
    torch.manual_seed(0)
    model = Networks()
    parts = {"generator": model.generator, "critic": model.critic}
    optimizers = {name: torch.optim.Adam(part.parameters(), lr=1e-3, betas=(0.0, 0.9)) for name, part in parts.items()}
    images = torch.as_tensor(load_digits().data, dtype=torch.float32) / 8 - 1
    config = TrainingConfig(
        output_dir=folder, num_epochs=num_epochs, batch_size=64, eval_strategy="no", lr_scheduler_type=None, **settings
    )
    return WassersteinGan(model, config, TensorDataset(images), optimizers=optimizers)


if __name__ == "__main__":
    make(sys.argv[1] if len(sys.argv) > 1 else "wgan_gp").train()
