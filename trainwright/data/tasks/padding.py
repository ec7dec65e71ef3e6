"""Sequences of unequal lengths as one tensor.  B sequences, L the longest of them, F features."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from trainwright.config.errors import ConfigError


def pad(sequences: Sequence[Any], value: float, *, side: Literal["right", "left"] = "right") -> Tensor:
    """(B, L) or (B, L, F) of B sequences (l,) or (l, F), filled up with ``value`` after (or before) their ends.

    Whole numbers give int64. Nothing that is given is changed. L is at least 1, so that an empty text is a row, too.

    >>> pad([[5, 6, 7], [8]], 0)
    tensor([[5, 6, 7],
            [8, 0, 0]])
    """
    if side not in ("right", "left"):
        raise ConfigError(f"side: got {side!r}; 'right' or 'left' is allowed.")
    rows = [_as_tensor(row) for row in sequences]
    filled = next((row for row in rows if row.numel()), rows[0])
    length = max(1, *(len(row) for row in rows))
    padded = torch.full((len(rows), length, *filled.shape[1:]), value, dtype=filled.dtype, device=filled.device)
    for number, row in enumerate(rows):
        if len(row):
            padded[number, : len(row)] = row
    if side == "right":
        return padded
    shifts = [length - len(row) for row in rows]
    return torch.stack([row.roll(shift, dims=0) for row, shift in zip(padded, shifts, strict=True)])


def pad_mask(sequences: Sequence[Any], *, side: Literal["right", "left"] = "right") -> Tensor:
    """(B, L) int64: 1 where `pad` has kept a value, 0 where it has filled up."""
    return pad([torch.ones(len(row), dtype=torch.int64, device="cpu") for row in sequences], 0, side=side)


def _as_tensor(row: Any) -> Tensor:
    tensor = row if isinstance(row, Tensor) else torch.as_tensor(row, device="cpu")
    if tensor.numel() == 0 and not isinstance(row, Tensor):
        return tensor.to(torch.int64)  # an empty list has no type of its own
    return tensor if tensor.is_floating_point() else tensor.to(torch.int64)
