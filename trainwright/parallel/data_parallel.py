"""Data parallelism: every rank holds the model and trains on its share of each global batch."""

import gc
from weakref import WeakSet

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainwright.parallel.dist import get_world_size

_wrapped: WeakSet[DistributedDataParallel] = WeakSet()


def wrap_data_parallel(model: nn.Module, device: torch.device, *, find_unused_parameters: bool = False) -> nn.Module:
    """The model in torch's DistributedDataParallel, which averages gradients; itself when there is one rank.

    ``find_unused_parameters``: some parameters take no part in some steps. Costs a walk through the graph in each.
    """
    if get_world_size() == 1:
        return model
    device_ids = None if device.type == "cpu" else [device]
    wrapped = DistributedDataParallel(model, device_ids=device_ids, find_unused_parameters=find_unused_parameters)
    watch_wrapped(wrapped)
    return wrapped


def watch_wrapped(model: nn.Module) -> None:
    """Let :func:`release_process_group` know of a model that was wrapped elsewhere."""
    if isinstance(model, DistributedDataParallel):
        _wrapped.add(model)


def release_process_group() -> None:
    """Let go of the process group in every wrapped model: they cannot train any more.

    While anything holds the group its threads run on, and one that is still busy with its last exchange when Python
    ends aborts the process, after all work was done (gloo on torch 2.13, in about one of ten runs of two processes).
    """
    for model in _wrapped:
        for name in ("reducer", "logger", "process_group"):
            setattr(model, name, None)
    gc.collect()  # wrapped models that are out of use may wait for the collector with what they hold


def unwrap_model(model: nn.Module) -> nn.Module:
    """The user's model, without the data-parallel wrapper."""
    return model.module if isinstance(model, DistributedDataParallel) else model
