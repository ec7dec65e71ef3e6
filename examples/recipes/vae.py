"""A variational autoencoder of handwritten digits: two losses, both in the log, and pictures that it draws.

python examples/recipes/vae.py
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from trainwright import Trainer, TrainingConfig, get_event_storage
from trainwright.data import ColumnDataset
from trainwright.hooks import Callback


class VAE(nn.Module):
    """B batch, P pixels, H hidden, Z latent variables."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 2 * 8))
        self.decoder = nn.Sequential(nn.Linear(8, 128), nn.ReLU(), nn.Linear(128, 64))

    def forward(self, pixels: Tensor) -> dict[str, Tensor]:
        mean_BZ, log_var_BZ = self.encoder(pixels).chunk(2, dim=1)
        latent_BZ = mean_BZ + torch.randn_like(mean_BZ) * (0.5 * log_var_BZ).exp()
        logits_BP = self.decoder(latent_BZ)
        reconstruction = F.binary_cross_entropy_with_logits(logits_BP, pixels, reduction="sum") / len(pixels)
        kl = -0.5 * (1 + log_var_BZ - mean_BZ.square() - log_var_BZ.exp()).sum(dim=1).mean()
        return {"reconstruction_loss": reconstruction, "kl_loss": kl}  # total_loss is their sum


class Draw(Callback):
    """An image of eight new digits after each epoch, for TensorBoard."""

    def __init__(self, model: VAE) -> None:
        self.model, self.latent_BZ = model, torch.randn(8, 8, generator=torch.Generator().manual_seed(0))

    @torch.no_grad()
    def on_epoch_end(self, epochs: int, logs: dict[str, Tensor]) -> None:
        pixels_BP = self.model.decoder(self.latent_BZ).sigmoid()
        get_event_storage().put_image("digits", pixels_BP.view(8, 8, 8).transpose(0, 1).reshape(8, 64))


def main(folder: str = "output/recipes/vae", num_epochs: int = 10) -> Trainer:
    torch.manual_seed(0)
    pixels = torch.from_numpy(load_digits().data.astype("float32") / 16)
    model = VAE()
    config = TrainingConfig(
        output_dir=folder,
        num_epochs=num_epochs,
        batch_size=64,
        learning_rate=1e-3,
        lr_scheduler_type=None,
        metrics=None,
        early_stopping=None,
        log_steps=10,
    )
    train_data, eval_data = ColumnDataset(pixels=pixels[:1500]), ColumnDataset(pixels=pixels[1500:])
    trainer = Trainer(model, config, train_data, eval_data, callbacks=[Draw(model)])
    print(trainer.train())
    return trainer


if __name__ == "__main__":
    main()
