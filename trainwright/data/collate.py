"""From samples to a batch, and from a batch to the arguments of the model's ``forward`` on its device."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from trainwright._torch_compat.batch_collate import collate_parts
from trainwright.data.errors import DataError, difference
from trainwright.data.instance import DistTensorData, Instance

# Losses need class labels as int64. uint8 stays: it is the type of images, and torch's losses accept it for labels.
_PROMOTED = frozenset({torch.int8, torch.int16, torch.int32, torch.uint16, torch.uint32, torch.uint64})

collate_parts()  # counts the types that torch knows, before the user adds any

_NOTE = "The batch of this step: "
_MAX_PARTS = 8  # longer lists are described by their length


def collate(samples: Sequence[Any]) -> Any:
    """Collate samples: `Instance` samples become an `Instance`, others the result of torch's ``default_collate``.

    Raises:
        DataError: the samples do not match; the message names the sample, the field and both shapes.
    """
    if isinstance(samples[0], Instance):
        return Instance.stack(samples)
    try:
        return _stacked(samples)
    except Exception:  # fall back to torch, which may succeed or raises the error
        return _as_torch_does(samples)


def add_batch_note(error: BaseException, batch: Any) -> None:
    """Add a note with the names, shapes, types and devices of the batch to an error of a step, once."""
    if not any(note.startswith(_NOTE) for note in getattr(error, "__notes__", ())):
        error.add_note(_NOTE + _describe(batch))


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)} on {value.device}"
    if isinstance(value, Instance):
        value = value.get_fields()
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_describe(item)}" for name, item in value.items()) + "}"
    if isinstance(value, tuple | list) and len(value) <= _MAX_PARTS:
        return "(" + ", ".join(map(_describe, value)) + ")"
    size = f" of {len(value)}" if hasattr(value, "__len__") else ""
    return f"{type(value).__name__}{size}"


def _as_torch_does(samples: Sequence[Any]) -> Any:
    try:
        return default_collate(samples)  # type: ignore[arg-type]  # it asks for a list and takes any sequence
    except (RuntimeError, TypeError, ValueError, KeyError) as error:
        raise DataError(f"data: {difference(samples) or f'the samples cannot be batched: {error}'}") from error


def _stacked(values: Sequence[Any]) -> Any:
    """A fast ``default_collate`` for tuples, lists and dictionaries, with torch's functions for their elements.

    Torch checks the length of each sample in Python, and each container against ten abstract types: 15 us for 32 pairs
    of tensors. Torch handles all other types.
    """
    kind = type(values[0])
    torch_collate, leaves, num_leaves = collate_parts()
    leaf = leaves.get(kind)
    if leaf is not None:
        return leaf(values, collate_fn_map=leaves)
    if len(leaves) == num_leaves:  # else the user has added types of their own, as torch's documents suggest
        if kind is tuple or kind is list:
            return [_stacked(parts) for parts in zip(*values, strict=True)]
        if kind is dict:
            return {name: _stacked([value[name] for value in values]) for name in values[0]}
    return torch_collate(values, collate_fn_map=leaves)


def to_batch(data: Any, device: torch.device | str = "cpu") -> Any:
    """The batch with its tensors on ``device``: a dictionary for an `Instance`, otherwise the same type of container.

    Integer types that torch's losses do not accept as labels (int8, int16, int32, uint16, uint32, uint64) become int64;
    uint8, bool and floating point stay. Numpy arrays become tensors; text, numbers and None stay unchanged. Tensors
    that already match are not copied. Copies from pinned memory to an accelerator are asynchronous.

    >>> to_batch(Instance(labels=torch.tensor([3, 4], dtype=torch.int32)))
    {'labels': tensor([3, 4])}
    """
    device = torch.device(device)
    kind = type(data)
    if kind is dict or kind is list or kind is tuple:  # most batches: tensors side by side, and all there already
        for value in data.values() if kind is dict else data:
            if type(value) is not torch.Tensor or value.device != device or value.dtype in _PROMOTED:
                return _moved(data, device)
        return data if kind is tuple else data.copy()
    return _moved(data, device)


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return _moved_tensor(value, device)
    if isinstance(value, DistTensorData):
        return _moved_tensor(value.tensor, device)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return _moved_tensor(torch.as_tensor(value, device="cpu"), device)
    if isinstance(value, Instance):
        return {name: _moved(item, device) for name, item in value.get_fields().items()}
    if isinstance(value, Mapping):
        return {name: _moved(item, device) for name, item in value.items()}
    if isinstance(value, tuple):
        items = [_moved(item, device) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [_moved(item, device) for item in value]
    return value


def _moved_tensor(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    dtype = torch.int64 if tensor.dtype in _PROMOTED else tensor.dtype
    if device.type == "cpu":
        return tensor.to(device=device, dtype=dtype)  # from an accelerator: waits, for an unfinished copy could be read
    return tensor.to(device=device, dtype=dtype, non_blocking=tensor.is_pinned())
