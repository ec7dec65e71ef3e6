"""A fingerprint of a data set: equal for equal data in memory, at the cost of reading a few kilobytes of it."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import xxhash

_MAX_ITEMS, _MAX_DEPTH, _MAX_TEXT = 64, 4, 4096
_PLAIN = (str, bytes, int, float, bool, type(None))


def described_data(dataset: Any) -> dict[str, Any]:
    """The class, the length and the fingerprint of a data set; the two last are None where they are unknown."""
    try:
        length = len(dataset)
    except (TypeError, NotImplementedError):
        length = None
    return {"class": type(dataset).__qualname__, "samples": length, "fingerprint": fingerprint(dataset)}


def fingerprint(dataset: Any) -> str | None:
    """16 hexadecimal digits of what a data set holds: tensors, arrays, lists, texts, numbers, and objects with these.

    Of each array and list at most 64 items are read, spread evenly, and no code of the data set is called, so that it
    costs little and draws no random numbers. Data that is read later counts with the names of its files, if the data
    set holds them. None: it holds nothing that can be read in this way.
    """
    own = getattr(dataset, "_fingerprint", None)  # of the package datasets
    if isinstance(own, str):
        return own[:16]
    found = xxhash.xxh3_64()
    return found.hexdigest() if _add(found, dataset, 0, set()) else None


def _add(found: Any, value: Any, depth: int, seen: set[int]) -> bool:
    """Add a value to the hash; returns whether it holds any data."""
    if isinstance(value, _PLAIN):
        found.update(f"{type(value).__name__}:{value!r}"[:_MAX_TEXT].encode(errors="replace"))
        return True
    if depth > _MAX_DEPTH or id(value) in seen:
        return False
    seen.add(id(value))
    if isinstance(value, torch.Tensor | np.ndarray):
        return _add_array(found, value)
    found.update(type(value).__qualname__.encode())
    if isinstance(value, Mapping):
        items = sorted(((str(key), item) for key, item in value.items()), key=lambda pair: pair[0])
        return _add_all(found, items, depth, seen)
    if isinstance(value, list | tuple | range):
        return _add_all(found, [(str(at), value[at]) for at in _spread(len(value))], depth, seen, len(value))
    attributes = getattr(value, "__dict__", None)
    if callable(value) or isinstance(value, type) or not isinstance(attributes, dict):
        return False  # its text may have an address
    return _add_all(found, sorted(attributes.items()), depth, seen)


def _add_all(found: Any, items: list[tuple[str, Any]], depth: int, seen: set[int], length: int | None = None) -> bool:
    found.update(f"[{len(items) if length is None else length}".encode())
    any_data = False
    for name, item in items[: 4 * _MAX_ITEMS]:
        found.update(name.encode(errors="replace"))
        any_data = _add(found, item, depth + 1, seen) or any_data
    return any_data


def _add_array(found: Any, value: Any) -> bool:
    found.update(f"{tuple(value.shape)}{value.dtype}".encode())
    if isinstance(value, torch.Tensor):
        if not value.is_cpu or value.layout is not torch.strided:
            return True
        value = value.detach()
    kept = [value[at] for at in _spread(len(value))] if value.ndim else [value]
    for item in kept:
        flat = item.reshape(-1)[:_MAX_TEXT] if hasattr(item, "reshape") else item
        if isinstance(flat, torch.Tensor):
            flat = flat.contiguous().view(torch.uint8).numpy() if flat.numel() else b""
        found.update(flat.tobytes() if hasattr(flat, "tobytes") else repr(flat).encode())
    return True


def _spread(length: int) -> list[int]:
    """At most 64 places from the first to the last."""
    if length <= _MAX_ITEMS:
        return list(range(length))
    return [place * (length - 1) // (_MAX_ITEMS - 1) for place in range(_MAX_ITEMS)]
