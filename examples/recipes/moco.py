"""MoCo (He et al. 2020) on handwritten digits: a momentum encoder and a queue of keys, saved with the run.

B batch, F features of the projection, Q keys in the queue.
"""

import copy
import sys
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from torch.utils.data import TensorDataset

from trainwright import Trainer, TrainingConfig

MOMENTUM, TEMPERATURE = 0.99, 0.1


class Keys(nn.Module):
    """The momentum encoder and its latest keys."""

    def __init__(self, encoder: nn.Module, size: int = 256, num_features: int = 32) -> None:
        super().__init__()
        self.encoder = copy.deepcopy(encoder).requires_grad_(False)
        self.register_buffer("queue_QF", normalize(torch.randn(size, num_features), dim=1))

    @torch.no_grad()
    def encode(self, encoder: nn.Module, images: Tensor) -> Tensor:
        """Move towards ``encoder``; return the keys of a batch."""
        for mine, other in zip(self.encoder.parameters(), encoder.parameters(), strict=True):
            mine.mul_(MOMENTUM).add_(other, alpha=1 - MOMENTUM)
        return normalize(self.encoder(images), dim=1)

    def enqueue(self, keys_BF: Tensor) -> None:
        self.queue_QF = torch.cat([keys_BF, self.queue_QF])[: len(self.queue_QF)]


def view(images: Tensor) -> Tensor:
    """A random view: noise, and some pixels set to 0."""
    return (images + 0.1 * torch.randn_like(images)) * (torch.rand_like(images) > 0.2)


def contrastive_loss(encoder: Any, keys: Keys, images: Tensor) -> Tensor:
    queries_BF = normalize(encoder(view(images)), dim=1)
    keys_BF = keys.encode(encoder, view(images))
    logits = torch.cat([(queries_BF * keys_BF).sum(1, keepdim=True), queries_BF @ keys.queue_QF.T], dim=1)
    keys.enqueue(keys_BF)
    return cross_entropy(logits / TEMPERATURE, torch.zeros(len(images), dtype=torch.int64))


class MoCo(Trainer):
    keys: Keys

    def compute_loss(self, model: Any, inputs: Any) -> Tensor:
        return contrastive_loss(model, self.keys, inputs[0])


def make(folder: str, num_epochs: int = 3, **settings: Any) -> MoCo:
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))
    images = torch.as_tensor(load_digits().data, dtype=torch.float32) / 16
    config = TrainingConfig(
        output_dir=folder,
        num_epochs=num_epochs,
        batch_size=64,
        eval_strategy="no",
        metrics=[],
        lr_scheduler_type=None,
        **settings,
    )
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.1, momentum=0.9)
    trainer = MoCo(encoder, config, TensorDataset(images), optimizer=optimizer)
    trainer.keys = Keys(encoder)
    trainer.checkpointer.add_checkpointable("keys", trainer.keys)  # in a resumed run its state is loaded here
    return trainer


if __name__ == "__main__":
    make(sys.argv[1] if len(sys.argv) > 1 else "moco").train()
