"""Evaluation leaves a run as it found it: module modes, gradient mode and randomness."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
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


@contextmanager
def kept_randomness(device: torch.device) -> Iterator[None]:
    """What is drawn inside from Python's, NumPy's and torch's generators changes nothing after it."""
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    try:
        with torch.random.fork_rng(_generator_indices(device), device_type=_generator_type(device)):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def _generator_type(device: torch.device) -> str:
    return "cuda" if device.type in ("cpu", "mps") else device.type


def _generator_indices(device: torch.device) -> list[int]:
    """The accelerator whose generator is kept. Apple's has no index and no draws in evaluation mode."""
    if device.type in ("cpu", "mps") or not torch.get_device_module(device).is_available():
        return []
    return [torch.get_device_module(device).current_device() if device.index is None else device.index]
