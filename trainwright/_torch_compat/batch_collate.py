"""Torch's collate functions by the type of the values, and its copy of a batch to pinned memory.

``default_collate`` checks each container against ten abstract types; calling the functions directly saves 15 us for a
batch of 32 pairs. Torch's documentation shows the table of these functions, under a private name.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from trainwright._torch_compat.probing import check_close, probed

Collate = Callable[..., Any]


@functools.cache
def collate_parts() -> tuple[Collate, dict[Any, Any], int]:
    """A function ``collate(values, collate_fn_map=table)``, torch's table of collate functions, and its length.

    The table is torch's own object, so types that are added to it later count. The fallback's table is empty.
    """
    return probed("batches of plain values", _find_collate, probe, (_default_collate, {}, 0))


def _find_collate() -> tuple[Collate, dict[Any, Any], int]:
    module: Any = torch.utils.data._utils.collate
    return module.collate, module.default_collate_fn_map, len(module.default_collate_fn_map)


def probe(parts: tuple[Collate, dict[Any, Any], int]) -> None:
    """Compare batches of tensors, and of numbers, with those of ``default_collate``."""
    collate, table, _ = parts
    rows = [torch.tensor([1.0, 2.0], dtype=torch.float32, device="cpu") + number for number in range(2)]
    for values in (rows, [1.0, 2.0], [3, 4]):
        expected = default_collate(values)
        for made in (collate(values, collate_fn_map=table), table[type(values[0])](values, collate_fn_map=table)):
            assert made.dtype == expected.dtype, f"a batch of {type(values[0]).__name__} is {made.dtype}"
            check_close("collate", made.flatten().tolist(), expected.flatten().tolist())


@functools.cache
def pin_memory() -> Callable[[Any], Any]:
    """A function that copies the tensors of a batch to pinned memory."""
    return probed("pinned memory", lambda: torch.utils.data._utils.pin_memory.pin_memory, _probe_pin, _pin)


def _probe_pin(pin: Callable[[Any], Any]) -> None:
    batch = {"text": ["a"], "pair": (1, 2.0)}  # without tensors: pinning one needs an accelerator
    assert pin(batch) == batch, "a batch is changed"


def _default_collate(values: Sequence[Any], *, collate_fn_map: Any) -> Any:
    return default_collate(values)  # type: ignore[arg-type]  # annotated as a list, accepts any sequence


def _pin(batch: Any) -> Any:
    if isinstance(batch, Tensor) or hasattr(batch, "pin_memory"):
        return batch.pin_memory()
    if isinstance(batch, Mapping):
        return {name: _pin(value) for name, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(_pin, batch))
    if isinstance(batch, list | tuple):
        return type(batch)(map(_pin, batch))
    return batch
