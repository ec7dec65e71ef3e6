"""The device that a name stands for, and the widest type that it computes in."""

import functools
import logging
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("trainwright.config")


def count_cpus() -> int:
    """The CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def find_device(name: str | None) -> "torch.device":
    """The device ``name``, by default the first of its type. None is the accelerator if available, else the CPU.

    A device that is not available is one warning and the CPU.
    """
    import torch

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if name is None:
        return torch.device("cpu") if accelerator is None else torch.device(accelerator.type, 0)
    device = torch.device(name)
    if device.type == "cpu":
        return device
    if accelerator is None or accelerator.type != device.type:
        warn_missing(device.type)
        return torch.device("cpu")
    index = device.index or 0
    if index >= torch.accelerator.device_count():
        warn_missing(f"{device.type}:{index}")
        return torch.device("cpu")
    return torch.device(device.type, index)


@functools.cache  # once per process and device
def warn_missing(name: str) -> None:
    """Warn that a requested device is not available."""
    logger.warning(
        "This machine has no %s device, which device_str (train.dist.device_type) sets: computing on the CPU.", name
    )


def wide_dtype(device: "torch.device") -> "torch.dtype":
    """The widest float dtype of the device: float64 holds every float, and integers up to 2**53."""
    import torch

    return torch.float32 if device.type == "mps" else torch.float64
