"""From samples to a batch, and from a batch to the arguments of the model's ``forward`` on its device."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from trainwright.data.errors import DataError
from trainwright.data.instance import DistTensorData, Instance
from trainwright.data.ragged import difference

# Losses want class labels as int64. uint8 is left alone: it is what images come in, and torch's losses take it as
# labels too.
_PROMOTED = frozenset({torch.int8, torch.int16, torch.int32, torch.uint16, torch.uint32, torch.uint64})


def collate(samples: Sequence[Any]) -> Any:
    """One batch: an `Instance` of `Instance` samples; of all others, what torch's ``default_collate`` makes.

    Raises:
        DataError: the samples do not fit together; says which sample, which field, both shapes, and what to do.
    """
    if isinstance(samples[0], Instance):
        return Instance.stack(samples)
    try:
        return default_collate(samples)  # type: ignore[arg-type]  # it asks for a list and takes any sequence
    except (RuntimeError, TypeError, ValueError, KeyError) as error:
        raise DataError(f"data: {difference(samples) or f'the samples cannot be batched: {error}'}") from error


def to_batch(data: Any, device: torch.device | str = "cpu") -> Any:
    """The batch with its tensors on ``device``: a dictionary for an `Instance`, else the container that it was.

    Whole numbers that torch's losses refuse as labels (int8, int16, int32, uint16, uint32, uint64) become int64;
    uint8, bool and floating point stay. Numpy arrays become tensors; text, numbers and None pass unchanged. Nothing
    is copied that is right already. Copies to an accelerator run beside the host when the memory is pinned.

    >>> to_batch(Instance(labels=torch.tensor([3, 4], dtype=torch.int32)))
    {'labels': tensor([3, 4])}
    """
    return _moved(data, torch.device(device))


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, DistTensorData):
        value = value.tensor
    elif isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        value = torch.as_tensor(value)
    if isinstance(value, torch.Tensor):
        return _moved_tensor(value, device)
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
