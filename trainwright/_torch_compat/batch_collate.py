"""Torch's functions that make a batch of values, by the type of the values, and its copy of a batch to pinned memory.

``default_collate`` asks of each container whether it is one of ten abstract kinds; by the functions themselves a batch
of 32 pairs takes 15 us less. Torch's documents show the table of these functions, under a private name.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from trainwright._torch_compat.probing import check_close, is_usable

Collate = Callable[..., Any]


@functools.cache
def collate_parts() -> tuple[Collate, dict[Any, Any], int]:
    """What collates by a table of types, ``collate(values, collate_fn_map=table)``; torch's table; its first length.

    The table is torch's own object: types that are added to it later count. It is empty where the public way is taken.
    """
    found: list[tuple[Collate, dict[Any, Any], int]] = []

    def find() -> None:
        torchs: Any = torch.utils.data._utils.collate
        table = torchs.default_collate_fn_map
        probe(torchs.collate, table)
        found.append((torchs.collate, table, len(table)))

    return found[0] if is_usable("batches of plain values", find) else (_default_collate, {}, 0)


def probe(collate: Collate, table: dict[Any, Any]) -> None:
    """Compare batches of tensors, and of numbers, with those of ``default_collate``."""
    rows = [torch.tensor([1.0, 2.0], dtype=torch.float32, device="cpu") + number for number in range(2)]
    for values in (rows, [1.0, 2.0], [3, 4]):
        expected = default_collate(values)
        for made in (collate(values, collate_fn_map=table), table[type(values[0])](values, collate_fn_map=table)):
            assert made.dtype == expected.dtype, f"a batch of {type(values[0]).__name__} is {made.dtype}"
            check_close("collate", made.flatten().tolist(), expected.flatten().tolist())


@functools.cache
def pin_memory() -> Callable[[Any], Any]:
    """What copies the tensors of a batch to pinned memory."""
    found: list[Callable[[Any], Any]] = []

    def find() -> None:
        pin: Any = torch.utils.data._utils.pin_memory.pin_memory
        batch = {"text": ["a"], "pair": (1, 2.0)}  # tensors can be pinned only where there is an accelerator
        assert pin(batch) == batch, "a batch is changed"
        found.append(pin)

    return found[0] if is_usable("pinned memory", find) else _pinned


def _default_collate(values: Sequence[Any], *, collate_fn_map: Any) -> Any:
    return default_collate(values)  # type: ignore[arg-type]  # it asks for a list and takes any sequence


def _pinned(batch: Any) -> Any:
    if isinstance(batch, Tensor) or hasattr(batch, "pin_memory"):
        return batch.pin_memory()
    if isinstance(batch, Mapping):
        return {name: _pinned(value) for name, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(_pinned, batch))
    if isinstance(batch, list | tuple):
        return type(batch)(map(_pinned, batch))
    return batch
