"""Which device this process computes on."""

import torch

from trainwright.config.devices import find_device
from trainwright.parallel.dist import get_local_rank


def pick_device(device_type: str | None = None) -> torch.device:
    """This process's device: the accelerator if there is one, else the CPU; or the type that is asked for.

    An accelerator that is asked for and not there is one warning and the CPU.
    """
    device = find_device(device_type)
    if device.type == "cpu":
        return device
    if device_type is None or torch.device(device_type).index is None:
        device = torch.device(device.type, get_local_rank())
    assert device.index is not None, "found with its index, or given one here"
    torch.accelerator.set_device_index(device.index)
    return device
