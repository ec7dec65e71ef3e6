"""The recipe of a VAE has the losses and weights of a plain loop."""

import runpy
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn

from trainwright.data.seeding import permutation

RECIPE = runpy.run_path(str(Path(__file__).parents[2] / "examples/recipes/vae.py"))


def by_hand(num_epochs: int) -> tuple[nn.Module, list[dict[str, float]]]:
    torch.manual_seed(0)
    pixels = torch.from_numpy(load_digits().data.astype("float32") / 16)[:1500]
    model, logged = RECIPE["VAE"](), []
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    torch.manual_seed(42)
    for epoch in range(num_epochs):
        for rows in permutation(1500, 42, epoch)[: 23 * 64].split(64):
            losses = model(pixels[rows])
            total = losses["reconstruction_loss"] + losses["kl_loss"]
            total.backward()
            optimizer.step()
            optimizer.zero_grad()
            logged.append({"total_loss": total.item(), **{name: value.item() for name, value in losses.items()}})
    return model, logged


def test_losses_and_weights_are_those_of_the_plain_loop(tmp_path: Path) -> None:
    trainer = RECIPE["main"](str(tmp_path), 2)
    model, logged = by_hand(2)
    for name in ("total_loss", "reconstruction_loss", "kl_loss"):
        assert [value for value, _ in trainer.storage.history(name).values()] == [row[name] for row in logged]
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name
    assert [image.name for image in trainer.storage.media()] == ["digits", "digits"]
