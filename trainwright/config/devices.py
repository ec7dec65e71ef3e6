"""Devices by name. Torch is imported when one is looked up."""

import functools
import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("trainwright.config")


def find_device(name: str | None) -> "torch.device":
    """The device of that name; of a kind of device the first; for None the accelerator if there is one, else the CPU.

    One that is not there is one warning and the CPU.
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
    """Say that a device that was asked for is not there."""
    logger.warning("This machine has no %s device: computing on the CPU.", name)
