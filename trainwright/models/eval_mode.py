"""Asking a model leaves it as it was: the modes of its modules, and whether gradients are recorded."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """``model.eval()`` without gradients; afterwards, also after an exception, each submodule has the mode it had."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        # Not inference_mode: a tensor that a model makes here and keeps (a table of positions, say) could then never
        # take part in training again.
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
