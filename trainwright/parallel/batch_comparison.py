"""Batches of several processes: their shapes, and whether they are the same."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trainwright.base.errors import ConfigError


def shapes_of(batch: Any) -> Any:
    """The shapes and types of a batch's tensors, as a key."""
    if isinstance(batch, Tensor):
        return tuple(batch.shape), batch.dtype
    if isinstance(batch, Mapping):
        return tuple((name, shapes_of(value)) for name, value in batch.items())
    if isinstance(batch, tuple | list):
        return tuple(map(shapes_of, batch))
    return type(batch)


def check_same(batches: Sequence[Any], gather: Callable[[Any], list[Any]], ranks: str) -> None:
    """Raise on all ``ranks`` if they have read different batches: their losses would be those of no model.

    ``gather`` returns the value of each of them.
    """
    first, *others = gather(_checksums([*batches]))
    different = next((stage for stage, other in enumerate(others, start=1) if other != first), None)
    if different is None:
        return
    pairs = zip(first, others[different - 1], strict=False)
    one, other = next(((one, other) for one, other in pairs if one != other), (None, None))
    raise ConfigError(
        f"{ranks} 0 and {different} have read different batches: {_difference(one, other)}. All of them must"
        " read the same ones: a loader must not draw from the random generators of its process. Pass"
        " generator=torch.Generator().manual_seed(0) to a DataLoader that shuffles."
    )


def _checksums(batch: Any) -> Any:
    """The shape and a checksum of each tensor of a batch."""
    if isinstance(batch, Tensor):
        flat = batch.detach().cpu().contiguous().flatten()
        return tuple(batch.shape), zlib.crc32(flat.view(torch.uint8).numpy().tobytes()) if flat.numel() else 0
    if isinstance(batch, Mapping):
        return {name: _checksums(value) for name, value in batch.items()}
    if isinstance(batch, tuple | list):
        return [_checksums(value) for value in batch]
    return None


def _difference(here: Any, there: Any) -> str:
    if isinstance(here, dict) and isinstance(there, dict) and here.keys() == there.keys():
        return f"{', '.join(repr(name) for name in here if here[name] != there[name])} differ"
    return "its fields differ"
