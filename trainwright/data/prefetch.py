"""Prefetching to the accelerator: while a step computes, the next batch is read and copied in the background.

Order and content of the batches do not change. Reading is one batch ahead of training, as with workers: the position of
a resumed run counts the batches trained on, not the batches read.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from trainwright.base.batch import moved_object, rebuilt

_WITH_STREAMS = ("cuda", "xpu")


def ahead(batches: Iterable[Any], device: torch.device) -> Iterator[Any]:
    """``batches`` with their tensors on ``device``, each read and copied while the previous step is computed.

    Types of tensors and containers stay. Tensors in pinned memory, as our loaders give them, are copied
    asynchronously. Mappings become dictionaries; objects without ``to`` and ``record_stream`` are not copied. On a
    device without streams, such as the CPU, the batches are returned unchanged, and none is prefetched.
    """
    return _one_ahead(batches, SideStream(device)) if device.type in _WITH_STREAMS else iter(batches)


class _Begun(NamedTuple):
    batch: Any
    tensors: list[Tensor]


def _one_ahead(batches: Iterable[Any], copier: "SideStream") -> Iterator[Any]:
    reading = iter(batches)
    begun = _begin(reading, copier)
    while isinstance(begun, _Begun):
        batch, tensors = begun
        copier.wait_for(tensors)
        begun = _begin(reading, copier)
        yield batch
    if begun is not None:
        try:
            raise begun
        finally:
            del begun  # its traceback holds this frame


def _begin(reading: Iterator[Any], copier: "SideStream") -> _Begun | Exception | None:
    """The next batch, whose copy has started; None at the end. An error is raised with its own batch: those before it
    are trained on first, as without prefetching.
    """
    try:
        return _Begun(*copier.copied(next(reading)))
    except StopIteration:
        return None
    except Exception as error:
        return error


class SideStream:
    """A stream of the device for copies. Batches are read on the stream of the step: some are on the device already."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device)

    def copied(self, batch: Any) -> tuple[Any, list[Tensor]]:
        """Start the copy: the batch on the device, and its tensors that are still being copied."""
        tensors: list[Tensor] = []
        with self._stream:
            return rebuilt(partial(_on, self._device, tensors), batch), tensors

    def wait_for(self, tensors: list[Tensor]) -> None:
        """Make all later computations wait for these tensors."""
        if tensors:
            current = torch.accelerator.current_stream(self._device)
            current.wait_stream(self._stream)
            for tensor in tensors:
                tensor.record_stream(current)  # its memory must not be reused for the next copy while a step reads it


def _on(device: torch.device, moved: list[Any], value: Any) -> Any:
    """A value on the device. If it had to be copied, its tensors are added to ``moved``."""
    if isinstance(value, Tensor):
        if value.device.type == device.type:  # created there, on the stream of the step
            return value
        moved.append(value.to(device, non_blocking=value.is_pinned()))
        return moved[-1]
    if isinstance(value, PackedSequence):
        packed = moved_object(value, device)
        moved.extend(part for part in packed if isinstance(part, Tensor) and part.device.type == device.type)
        return packed
    if hasattr(value, "to") and hasattr(value, "record_stream"):  # without the second, the step copies it
        moved.append(moved_object(value, device))
        return moved[-1]
    return value
