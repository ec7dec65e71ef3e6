"""Evaluation leaves a run as it found it: module modes, gradient mode and randomness."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from trainwright.models.modes import evaluation_mode as evaluation_mode  # where models themselves use it


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
