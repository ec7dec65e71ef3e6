"""Ranks: who am I, how many are we, and the few exchanges of Python values between us.

Everything works in a single process too, where there is one rank and every exchange is the identity.
Imports nothing of ours, so every room may import it.
"""

import os
import sys
from typing import Any, TypeVar

T = TypeVar("T")


def _is_initialized() -> bool:
    dist = sys.modules.get("torch.distributed")  # not imported means not initialized
    return dist is not None and dist.is_available() and dist.is_initialized()


def get_rank() -> int:
    """This process's number in ``[0, get_world_size())``."""
    if not _is_initialized():
        return 0
    import torch.distributed as dist

    return dist.get_rank()


def get_world_size() -> int:
    """How many processes train together."""
    if not _is_initialized():
        return 1
    import torch.distributed as dist

    return dist.get_world_size()


def get_local_rank() -> int:
    """This process's number on its machine, as ``torchrun`` says it."""
    return int(os.environ.get("LOCAL_RANK", 0))


def is_main_process() -> bool:
    """Whether this is rank 0: the one that writes files."""
    return get_rank() == 0


def get_data_parallel_rank() -> int:
    """Which share of each global batch this process trains on. All ranks are data-parallel here."""
    return get_rank()


def get_data_parallel_size() -> int:
    """Into how many shares a global batch is split."""
    return get_world_size()


def synchronize() -> None:
    """Wait until every rank has come here."""
    if get_world_size() > 1:
        import torch.distributed as dist

        dist.barrier()


def all_gather_object(value: T) -> list[T]:
    """The value of every rank, by rank."""
    world_size = get_world_size()
    if world_size == 1:
        return [value]
    import torch.distributed as dist

    values: list[Any] = [None] * world_size
    dist.all_gather_object(values, value)
    return values


def broadcast_object(value: T) -> T:
    """Rank 0's value on every rank."""
    if get_world_size() == 1:
        return value
    import torch.distributed as dist

    values: list[Any] = [value]
    dist.broadcast_object_list(values)
    result: T = values[0]
    return result
