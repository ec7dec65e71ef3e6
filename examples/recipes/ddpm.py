"""Denoising diffusion (Ho et al. 2020): a network learns the noise in digits; the average of its weights draws some."""

from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from trainwright import Trainer, TrainingConfig
from trainwright.data import ColumnDataset

BATCH, EPOCHS, STEPS, DECAY = 64, 2, 100, 0.99
ALPHAS = torch.cumprod(1 - torch.linspace(1e-4, 0.05, STEPS), 0)  # the share of the image after each step of noise


def data() -> ColumnDataset:
    images, _ = load_digits(return_X_y=True)
    return ColumnDataset(images=torch.tensor(images, dtype=torch.float32) / 8 - 1)


class Denoiser(nn.Module):
    """Predicts the noise in images of 64 pixels; in training returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.time = nn.Embedding(STEPS, 64)
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.SiLU(), nn.Linear(256, 256), nn.SiLU(), nn.Linear(256, 64))

    def noise_in(self, images: Tensor, steps: Tensor) -> Tensor:
        return self.layers(images + self.time(steps))

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        steps = torch.randint(STEPS, (len(images),))
        noise, alpha = torch.randn_like(images), ALPHAS[steps][:, None]
        noisy = alpha.sqrt() * images + (1 - alpha).sqrt() * noise
        return {"loss": F.mse_loss(self.noise_in(noisy, steps), noise)}


@torch.no_grad()
def draw(model: Denoiser, num_images: int) -> Tensor:
    images = torch.randn(num_images, 64)
    for step in reversed(range(STEPS)):
        before = ALPHAS[step - 1] if step else torch.tensor(1.0)
        alpha, beta = ALPHAS[step], 1 - ALPHAS[step] / before
        noise = model.noise_in(images, torch.full((num_images,), step))
        images = (images - beta / (1 - alpha).sqrt() * noise) / (1 - beta).sqrt()
        if step:
            images += beta.sqrt() * torch.randn_like(images)
    return images


def main(folder: str = "output/recipes/ddpm") -> Trainer:
    config: dict[str, Any] = {"output_dir": folder, "num_epochs": EPOCHS, "batch_size": BATCH, "lr": 1e-3}
    config |= {"metrics": [], "lr_scheduler_type": None, "ema": {"decay": DECAY}, "device": "cpu"}
    trainer = Trainer(Denoiser(), TrainingConfig(**config), train_dataset=data())
    trainer.train()
    digit = draw(trainer.model, 1).view(8, 8)  # type: ignore[arg-type]  # the model now holds the averaged weights
    print("\n".join("".join(" .:*#"[int(((p + 1) * 2.4).clamp(0, 4))] for p in row) for row in digit))
    return trainer


if __name__ == "__main__":
    main()
