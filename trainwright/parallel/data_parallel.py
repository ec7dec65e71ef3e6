"""Data parallelism: join the processes of a launcher (``torchrun``), wrap the model on each rank, and leave them.

Every rank holds the model and trains on its share of each global batch.
"""

import atexit
import gc
import logging
import os
from collections.abc import Mapping
from datetime import timedelta
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainwright.config.errors import ConfigError
from trainwright.config.torch_names import find_device
from trainwright.parallel.dist import get_local_rank, get_world_size

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


logger = logging.getLogger("trainwright.parallel")


def setup_dist_util(sizes: Mapping[str, object] | None = None, *, timeout_s: float = 1800.0) -> torch.device:
    """Join the process group when a launcher started several processes, and return this process's device.

    ``sizes`` are the ``train.dist`` settings: ``tensor_parallel_size`` and ``pipeline_parallel_size`` (both 1 in this
    version) and ``device_type``. All processes are data-parallel, so ``data_parallel_size`` follows from how many
    there are.

    Raises:
        ConfigError: tensor or pipeline parallelism is asked for.
    """
    sizes = sizes or {}
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        if (size := sizes.get(name) or 1) != 1:
            raise ConfigError(
                f"train.dist.{name}: got {size}; this version trains data-parallel only, so it must be 1."
                " Start more processes with torchrun instead."
            )
    device_type = sizes.get("device_type")
    device = pick_device(None if device_type is None else str(device_type))
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
        leave_at_exit()
    asked = sizes.get("data_parallel_size") or 1
    if asked not in (1, get_world_size()):
        logger.warning(
            "train.dist.data_parallel_size is %s, but %d processes were started: training on %d.",
            asked,
            get_world_size(),
            get_world_size(),
        )
    return device


def leave_at_exit() -> None:
    """See to it that the process leaves its group before it ends."""
    atexit.unregister(shut_down)  # once is enough
    atexit.register(shut_down)


def shut_down() -> None:
    """Leave the process group, if there is one; models under data parallelism cannot train any more."""
    if dist.is_available() and dist.is_initialized():
        release_process_group()
        dist.destroy_process_group()
