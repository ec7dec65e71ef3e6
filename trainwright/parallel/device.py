"""Which device this process computes on."""

import functools
import logging

import torch

from trainwright.parallel.dist import get_local_rank

logger = logging.getLogger("trainwright.parallel")


def pick_device(device_type: str | None = None) -> torch.device:
    """This process's device: the accelerator if there is one, else the CPU; or the type that is asked for.

    An accelerator that is asked for and not there is one warning and the CPU.
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device_type is None:
        device_type = accelerator.type if accelerator is not None else "cpu"
    device = torch.device(device_type)
    if device.type == "cpu":
        return device
    if accelerator is None or accelerator.type != device.type:
        _warn_missing(device.type)
        return torch.device("cpu")
    if device.index is None:
        device = torch.device(device.type, get_local_rank())
    torch.accelerator.set_device_index(device.index)
    return device


@functools.cache  # once per process and device type
def _warn_missing(device_type: str) -> None:
    logger.warning("This machine has no %s device: computing on the CPU.", device_type)
