"""A GAN of handwritten digits: two optimizers, two losses in each step."""

import sys
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.utils.data import TensorDataset

from trainwright import Trainer, TrainingConfig

NOISE = 16


class Networks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(NOISE, 64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh())
        self.discriminator = nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))


class Gan(Trainer):
    def train_step(self, model: Any, inputs: Any) -> dict[str, Tensor]:
        (real,) = inputs
        fake = model.generator(torch.randn(len(real), NOISE))
        loss_d = softplus(-model.discriminator(real)).mean() + softplus(model.discriminator(fake.detach())).mean()
        self.backward(loss_d, optimizer="d")
        self.step("d")

        loss_g = softplus(-model.discriminator(fake)).mean()
        self.backward(loss_g, optimizer="g")
        self.step("g")
        self.storage.put_scalars(loss_d=loss_d.detach(), loss_g=loss_g.detach())
        return {"step_loss": loss_g.detach()}


def make(folder: str, num_epochs: int = 3, **settings: Any) -> Trainer:
    torch.manual_seed(0)
    model = Networks()
    optimizers = {
        "g": torch.optim.Adam(model.generator.parameters(), lr=1e-3, betas=(0.5, 0.999)),
        "d": torch.optim.Adam(model.discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999)),
    }
    images = torch.as_tensor(load_digits().data, dtype=torch.float32) / 8 - 1
    config = TrainingConfig(
        output_dir=folder, num_epochs=num_epochs, batch_size=64, eval_strategy="no", lr_scheduler_type=None, **settings
    )
    return Gan(model, config, TensorDataset(images), optimizers=optimizers)


if __name__ == "__main__":
    make(sys.argv[1] if len(sys.argv) > 1 else "gan").train()
