"""Errors about the data: empty, damaged, or samples of unequal shapes that cannot be collated."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from trainwright.config.errors import UserError


class DataError(UserError, ValueError):
    """Data that cannot be trained on."""


_SUGGESTION = (
    "Samples of one batch need equal shapes: pad, crop or reshape them in the data set (for example image.unsqueeze(0) "
    "for a missing channel), or give the loader a collate_fn that pads."
)
_PAD = (
    "Lists of numbers become a tensor if they have one length. Pad them in a collator (data_collator=, or a loader's "
    "collate_fn=), for example transformers.DataCollatorWithPadding(tokenizer), or with torch's pad_sequence."
)


def difference(values: Sequence[Any], name: str = "") -> str | None:
    """Describe the first of ``values`` that does not match ``values[0]``, with a suggestion; None if all match.

    ``name`` is the path of the field; it grows by ``.key`` and ``[index]`` inside dictionaries and tuples.
    """
    first = values[0]
    its = f"{name!r} of " if name else ""
    for index, value in enumerate(values):
        who = f"sample {index} of the batch has"
        if _kind(value) != _kind(first):
            return f"{who} {its}type {_kind(value)}; sample 0 has {_kind(first)}. Give all samples one type."
        if _shape(value) != _shape(first):
            return f"{who} {its}shape {_shape(value)}; sample 0 has {_shape(first)}. {_SUGGESTION}"
        if isinstance(first, Mapping) and value.keys() != first.keys():
            keys, others = sorted(map(str, value)), sorted(map(str, first))
            return f"{who} {its}keys {keys}; sample 0 has {others}. Give all samples the same keys."
        if isinstance(first, tuple | list) and len(value) != len(first):
            is_of_numbers = all(isinstance(item, int | float) for item in (*value, *first))
            suggestion = _PAD if is_of_numbers else _SUGGESTION
            return f"{who} {its}length {len(value)}; sample 0 has {len(first)}. {suggestion}"
    for path, part in _parts(first, name):
        found = difference([part(value) for value in values], path)
        if found:
            return found
    return None


def _parts(first: Any, name: str) -> list[tuple[str, Any]]:
    """The paths of the elements of a value, with functions that return them."""
    if isinstance(first, Mapping):
        return [(f"{name}.{key}" if name else str(key), lambda value, key=key: value[key]) for key in first]
    if isinstance(first, tuple | list):
        return [(f"{name}[{index}]", lambda value, index=index: value[index]) for index in range(len(first))]
    return []


def _tensor(value: Any) -> Any:
    return getattr(value, "tensor", value)  # DistTensorData


def _shape(value: Any) -> tuple[int, ...] | None:
    array = _tensor(value)
    return tuple(array.shape) if isinstance(array, torch.Tensor | np.ndarray) else None


def _kind(value: Any) -> str:
    array = _tensor(value)
    return str(array.dtype) if isinstance(array, torch.Tensor | np.ndarray) else type(value).__name__
