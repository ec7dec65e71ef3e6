"""Evaluation mode that restores the mode of each submodule."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """``model.eval()`` without gradients; afterwards, also after an exception, each submodule has its previous mode."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        # Not inference_mode: a tensor that a model creates here and keeps, such as a table of positions, could then
        # never be used in training.
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
