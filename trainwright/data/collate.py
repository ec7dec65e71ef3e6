"""From samples to a batch."""

from collections import UserDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data import default_collate

from trainwright.base.batch import described, fields, is_label, pair
from trainwright.base.errors import ConfigTypeError
from trainwright.base.signatures import read_signature
from trainwright.data.errors import DataError, difference, unsupported
from trainwright.data.instance import Instance

_PLAIN = frozenset({torch.Tensor, int, float})


def collate(samples: Sequence[Any]) -> Any:
    """Collate samples: `Instance` samples become an `Instance`, others the result of torch's ``default_collate``.

    Fields that are lists of numbers become tensors (B, ...); torch would transpose them.

    Raises:
        DataError: the samples do not match; the message names the sample, the field and both shapes.
    """
    if isinstance(samples[0], Instance):
        return Instance.stack(samples)
    try:
        return _stacked(samples)
    except Exception:
        pass
    try:  # torch may succeed, or raises the error
        return default_collate(samples)  # type: ignore[arg-type]  # it asks for a list and takes any sequence
    except (RuntimeError, TypeError, ValueError, KeyError) as error:
        raise DataError(
            f"data: {difference(samples) or unsupported(samples[0]) or f'the samples cannot be batched: {error}'}"
        ) from error


def collated(collate_fn: Callable[[Any], Any], samples: Any) -> Any:
    """``collate_fn(samples)``; a clear error if it does not take one argument, or returns None."""
    try:
        batch = collate_fn(samples)
    except TypeError as error:
        try:
            read_signature(collate_fn).bind(samples)
        except ValueError:  # it has no signature
            pass
        except TypeError as mismatch:
            raise ConfigTypeError(
                f"data_collator: {_name(collate_fn)} is called with one argument, the list of samples: {mismatch}."
            ) from error
        raise
    if batch is None:
        raise DataError(f"data_collator: {_name(collate_fn)} returned None: is a return missing?")
    return batch


def _name(function: Any) -> str:
    return str(getattr(function, "__qualname__", type(function).__name__))


def _stacked(values: Sequence[Any], *, is_field: bool = False) -> Any:
    """``default_collate``, but fields that are lists of numbers become tensors."""
    kind = type(values[0])
    if kind is list and is_field and _holds_numbers(values[0]):
        return torch.tensor(values, device="cpu")
    if kind is tuple or kind is list:
        stacked = list[Any]()
        for parts in zip(*values, strict=True):
            is_plain = type(parts[0]) in _PLAIN
            stacked.append(default_collate(parts) if is_plain else _stacked(parts, is_field=True))  # type: ignore[arg-type]
        return stacked
    if kind is dict or isinstance(values[0], UserDict):  # the second: the outputs of tokenizers of transformers
        return {name: _stacked([value[name] for value in values], is_field=True) for name in values[0]}
    return default_collate(values)  # type: ignore[arg-type]  # it asks for a list and takes any sequence


def _holds_numbers(value: Any) -> bool:
    while type(value) is list and value:
        value = value[0]
    return isinstance(value, int | float)


def mixed(mixup_func: Callable[[Any, Any], tuple[Any, Any]], batch: Any) -> Any:
    """A batch of which ``mixup_func(images, labels)`` has replaced both: a pair, or named fields.

    The labels are the field ``labels``, else the only one with a name of labels; the images are ``images``, else the
    only other field of floating point with at least three dimensions.

    Raises:
        DataError: there are no such fields, or several.
    """
    if (both := pair(batch)) is not None:
        mixed_pair = mixup_func(*both)
        return [*mixed_pair] if isinstance(batch, list) else mixed_pair
    named = {name: v for name, v in (fields(batch) or {}).items() if isinstance(v, torch.Tensor)}
    labels = ["labels"] if "labels" in named else [name for name in named if is_label(name)]
    images = ["images"] if "images" in named else []
    if not images:
        images = [name for name, v in named.items() if name not in labels and v.is_floating_point() and v.dim() > 2]
    if len(images) != 1 or len(labels) != 1:
        raise DataError(
            f"mixup_func: the batch {described(batch)} has {len(images)} fields of images and {len(labels)} of labels."
            " Name them 'images' and 'labels', or mix in a get_batch or prepare_input_batch of your own."
        )
    new_images, new_labels = mixup_func(named[images[0]], named[labels[0]])
    return {**(fields(batch) or {}), images[0]: new_images, labels[0]: new_labels}
