"""Ranks: who am I, how many are we, and the few exchanges of Python values between us.

Everything works in a single process too, where there is one rank and every exchange is the identity.
Imports nothing of ours, so every package may import it.
"""

import hashlib
import os
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from typing import Any, TypeVar

T = TypeVar("T")
E = TypeVar("E", bound=BaseException)


def _torch_dist() -> Any:
    """``torch.distributed`` in a process group; None outside: not imported means not initialized."""
    dist = sys.modules.get("torch.distributed")
    return dist if dist is not None and dist.is_available() and dist.is_initialized() else None


def get_rank() -> int:
    """This process's number in ``[0, get_world_size())``."""
    dist = _torch_dist()
    return 0 if dist is None else int(dist.get_rank())


def get_world_size() -> int:
    """How many processes train together."""
    dist = _torch_dist()
    return 1 if dist is None else int(dist.get_world_size())


def get_local_rank() -> int:
    """This process's number on its machine, as ``torchrun`` says it."""
    return int(os.environ.get("LOCAL_RANK", 0))


def is_main_process() -> bool:
    """Whether this is rank 0: the one that writes files."""
    return get_rank() == 0


_warns = ContextVar("_warns", default=False)


def warns_here() -> bool:
    """Whether warnings of this process go to the console: rank 0's, and others' where they compute for it."""
    return is_main_process() or _warns.get()


@contextmanager
def warning_for_all(is_first: bool = True) -> Iterator[None]:
    """In this context the process computes what rank 0 does not, such as the last stage of a pipeline.

    ``is_first``: of those that compute the same for other data.
    """
    before = _warns.set(is_first)
    try:
        yield
    finally:
        _warns.reset(before)


_mesh: Any = None  # of parallel/mesh.py, which is not imported here


def use_mesh(mesh: Any) -> None:
    """Ask ``mesh`` for this process's place from now on; None: all processes are data-parallel."""
    global _mesh
    _mesh = mesh


def mesh_in_use() -> Any:
    """The argument of the latest :func:`use_mesh`."""
    return _mesh


def get_data_parallel_rank() -> int:
    """Which share of each global batch this process trains on, in ``[0, get_data_parallel_size())``."""
    return get_rank() if _mesh is None else int(_mesh.data_rank)


def get_data_parallel_size() -> int:
    """Into how many shares a global batch is split."""
    return get_world_size() if _mesh is None else int(_mesh.layout.data)


def get_averaging_rank() -> int:
    """This process's number in ``[0, get_averaging_size())``; it draws random numbers of its own."""
    return get_rank() if _mesh is None else int(_mesh.averaging_rank)


def get_averaging_size() -> int:
    """How many processes average their gradients: the data ranks, and the context ranks of each.

    An evaluation divides its samples between them, and no sequence.
    """
    return get_world_size() if _mesh is None else int(_mesh.layout.averaging)


def get_data_parallel_group() -> Any:
    """The process group of those that average their gradients, for ``torch.distributed``; None: all processes."""
    return None if _mesh is None else _mesh.data_group


def get_tensor_parallel_rank() -> int:
    """Which part of each layer this process holds, in ``[0, get_tensor_parallel_size())``."""
    return 0 if _mesh is None else int(_mesh.tensor_rank)


def get_tensor_parallel_size() -> int:
    """Into how many parts each layer is split."""
    return 1 if _mesh is None else int(_mesh.layout.tensor)


def get_pipeline_parallel_rank() -> int:
    """Which stage this process is, in ``[0, get_pipeline_parallel_size())``."""
    return 0 if _mesh is None else int(_mesh.pipeline_rank)


def get_pipeline_parallel_size() -> int:
    """Into how many stages the model is cut."""
    return 1 if _mesh is None else int(_mesh.layout.pipeline)


def synchronize() -> None:
    """Wait until every rank has come here."""
    if get_world_size() > 1:
        dist = _torch_dist()
        gpus = None
        if dist.get_backend() == "nccl":  # without a device it warns, and guesses one
            from torch import cuda

            gpus = [cuda.current_device()]
        dist.barrier(device_ids=gpus)


def all_gather_object(value: T, group: Any = None) -> list[T]:
    """The value of every rank of ``group`` (None: of all), by rank."""
    size = 1 if get_world_size() == 1 else _torch_dist().get_world_size(group)
    if size == 1:
        return [value]
    if device_of_collectives(group) == "cpu":
        return [pickle.loads(row) for row in all_gather_content(pickle.dumps(value), group)]
    values: list[Any] = [value] * size
    _torch_dist().all_gather_object(values, value, group=group)
    return values


def all_gather_content(content: bytes, group: Any = None) -> list[bytes]:
    """The bytes of every rank, perhaps with zeros behind them, by rank, on all ranks.

    Call it as ``dist.all_gather_content``: an estimate replaces it.
    """
    import torch

    (size,) = largest(len(content), group=group)
    rows = gather_bytes(torch.frombuffer(bytearray(content), dtype=torch.uint8), size, group, to_all=True)
    return [row.numpy().tobytes() for row in rows]


def largest(*numbers: int, group: Any = None) -> list[int]:
    """The largest value of each number over all ranks, which pass equally many: one small collective call.

    Call it as ``dist.largest``: an estimate replaces it.
    """
    if get_world_size() == 1:
        return [*numbers]
    import torch

    found = torch.tensor(numbers, dtype=torch.int64, device=device_of_collectives(group))
    _torch_dist().all_reduce(found, _torch_dist().ReduceOp.MAX, group=group)
    result: list[int] = found.tolist()
    return result


def device_of_collectives(group: Any = None) -> str:
    """The device of tensors that the ranks exchange: the CPU, where its backend is there."""
    entries = _torch_dist().get_backend_config(group).split(",")  # "cpu:gloo,cuda:nccl"
    devices = [entry.partition(":")[0] for entry in entries]
    return "cpu" if "cpu" in devices else str(devices[0])


# Up to this size of a row, rank 0 gathers the rows and broadcasts them: the other ranks send one message, and receive
# one. In an all-gather of gloo, a row passes all ranks, one after another: 145 us for each rank.
_GATHERED_ON_ONE = 16 * 2**10


def gather_bytes(sent: Any, size: int, group: Any = None, *, to_all: bool = False) -> list[Any]:
    """The bytes of every rank, a tensor with zeros up to ``size``, by rank, on rank 0 or on all; nothing elsewhere.

    Rank 0 is the first one of ``group``.
    """
    import torch

    sent = torch.cat([sent, sent.new_zeros(size - len(sent))])
    if get_world_size() == 1:
        return [sent]
    dist, device = _torch_dist(), device_of_collectives(group)
    sent, first, num_ranks = sent.to(device), _first_rank(group), dist.get_world_size(group)
    is_first, by_one = get_rank() == first, not to_all or (device == "cpu" and size <= _GATHERED_ON_ONE)
    together = sent.new_empty(num_ranks, size) if to_all or is_first else sent.new_empty(0)
    rows = list(together)
    if not by_one:
        dist.all_gather(rows, sent, group=group)
        return rows
    dist.gather(sent, rows if is_first else None, dst=first, group=group)
    if to_all:
        dist.broadcast(together, first, group=group)
    return rows


def gather_content(content: bytes, size: int, group: Any = None) -> list[bytes]:
    """The bytes of every rank, perhaps with zeros behind them, by rank, on rank 0; nothing elsewhere.

    ``size``: of the largest one. ``group``: of all ranks, on CPUs. The memory of rank 0 grows by what the ranks send,
    also if one sends much more.
    """
    import torch

    sent = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    if size <= _GATHERED_ON_ONE:
        return [row.numpy().tobytes() for row in gather_bytes(sent, size, group)]
    sizes = gather_bytes(torch.tensor([len(content)]).view(torch.uint8), 8, group)
    if not is_main_process():
        _torch_dist().send(sent, 0, group=group)
        return []
    rows = [sent, *(sent.new_empty(int(row.view(torch.int64).item())) for row in sizes[1:])]
    for rank, row in enumerate(rows[1:], start=1):
        _torch_dist().recv(row, rank, group=group)
    return [row.numpy().tobytes() for row in rows]


def _first_rank(group: Any) -> int:
    return 0 if group is None else int(_torch_dist().get_global_rank(group, 0))


def is_any(value: bool) -> bool:
    """Whether ``value`` is true on any rank."""
    return bool(largest(value)[0])


def is_same(content: bytes, group: Any = None) -> bool:
    """Whether all ranks of ``group`` pass the same bytes: one small collective call."""
    number = int.from_bytes(hashlib.sha256(content).digest()[:7], "big")
    return sum(largest(number, -number, group=group)) == 0


def new_cpu_group(timeout: timedelta | None = None) -> Any:
    """A further process group of all ranks, for exchanges in another thread. Every rank must call this."""
    return _torch_dist().new_group(backend="gloo", timeout=timeout) if get_world_size() > 1 else None


def gather_over_data(value: T) -> list[T]:
    """The value of every data rank of this process's stage and part, by data rank."""
    return all_gather_object(value, get_data_parallel_group())


def reduce_over_data(tensor: Any) -> None:
    """Add up a tensor over the data ranks of this process's stage and part, in place."""
    if get_averaging_size() > 1:
        _torch_dist().all_reduce(tensor, group=get_data_parallel_group())


def start_sum_over_data(tensor: Any) -> Any:
    """As `reduce_over_data`, of several ranks: call ``wait()`` of the result before the tensor is read."""
    return _torch_dist().all_reduce(tensor, group=get_data_parallel_group(), async_op=True)


def broadcast_over_data(tensor: Any) -> None:
    """The values of the first data rank of this process's stage and part, in place."""
    if get_averaging_size() > 1:
        group = get_data_parallel_group()
        tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # a part, of tensor ranks
        _torch_dist().broadcast(tensor, _first_rank(group), group=group)


# The attribute of a parameter that copies a weight of an earlier stage, where its gradient is counted: its name there.
TIED_COPY = "copy_of"


def gather_over_pipeline(value: T) -> list[T]:
    """The value of every stage of this process's pipeline, by stage."""
    return [value] if _mesh is None else all_gather_object(value, _mesh.pipeline_group)


def reduce_over_pipeline(tensor: Any, *, is_max: bool = False) -> None:
    """Add up a tensor over the stages of this process's pipeline, in place; ``is_max``: take the largest value."""
    if get_pipeline_parallel_size() > 1:
        dist = _torch_dist()
        dist.all_reduce(tensor, dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM, group=_mesh.pipeline_group)


def broadcast_object(value: T, group: Any = None) -> T:
    """Rank 0's value on every rank."""
    values: list[Any] = [value]
    if get_world_size() > 1:
        _torch_dist().broadcast_object_list(values, group=group)
    result: T = values[0]
    return result


@contextmanager
def raised_together(numbers: list[int] | None = None) -> Iterator[None]:
    """A block that every rank enters. The ranks synchronize at its end; the first rank's error is raised on all.

    ``numbers``: equally many on every rank; after the block, the largest of each over all ranks.
    """
    numbers = [] if numbers is None else numbers
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    is_failed, *numbers[:] = largest(error is not None, *numbers)
    if is_failed and get_world_size() > 1:
        errors = all_gather_object(None if error is None else portable(error))
        first = next((rank for rank, other in enumerate(errors) if other is not None), None)
        if first is not None and first != get_rank():
            error = errors[first]
            assert error is not None
            error.raised_on_rank = first  # type: ignore[attr-defined]  # see parallel/faults.py
    if error is not None:
        raise error


def portable(error: E) -> E | RuntimeError:
    """The error if it can be pickled, otherwise a RuntimeError with the same message."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # pickling may run arbitrary code of the error's class
        return RuntimeError(f"rank {get_rank()}: {type(error).__name__}: {error}")
    return error
