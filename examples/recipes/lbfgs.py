"""Multinomial regression of handwritten digits with LBFGS: the trainer passes the closure."""

import sys
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from trainwright import Trainer, TrainingConfig


def make(folder: str, num_epochs: int = 5, **settings: Any) -> Trainer:
    torch.manual_seed(0)
    digits = load_digits()
    data = TensorDataset(torch.as_tensor(digits.data, dtype=torch.float32) / 16, torch.as_tensor(digits.target))
    config = TrainingConfig(
        output_dir=folder,
        num_epochs=num_epochs,
        batch_size=len(data),
        loss="CrossEntropyLoss",
        optimizer={"name_": "LBFGS", "lr": 1.0, "max_iter": 5, "line_search_fn": "strong_wolfe"},
        eval_strategy="no",
        lr_scheduler_type=None,
        **settings,
    )
    return Trainer(nn.Linear(64, 10), config, data)


if __name__ == "__main__":
    make(sys.argv[1] if len(sys.argv) > 1 else "lbfgs").train()
