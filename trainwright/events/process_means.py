"""Means over all processes: each records its part of a value, and the parts of many values are added up in one call.

A part is a tensor of shape (2,): numerator and denominator.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard
from zlib import crc32

import torch
from torch import Tensor

from trainwright.base import dist
from trainwright.base.devices import wide_dtype
from trainwright.base.errors import ConfigError

Key = tuple[str, int, int]  # metric, iteration, place among its newest values


class LocalMeans(NamedTuple):
    """The newest values of a metric, which are means of this process until they are added up."""

    first_iteration: int
    total_before: float  # of the values before them
    parts: list[Tensor | None]  # of each value; None: a value that is final


def is_part(value: Any) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.dim() == 1


def with_parts(pending: list[tuple[str, Any, int]]) -> list[tuple[str, float | Tensor, int]]:
    """``pending`` with means and weights as parts, computed at once."""
    pairs = [value for _, value, _ in pending if type(value) is tuple]
    if not pairs:
        return pending
    device = pairs[0][0].device
    wide = wide_dtype(device)
    if len({mean.dtype for mean, _ in pairs}) > 1:
        pairs = [(mean.to(wide), weight) for mean, weight in pairs]
    means = torch.stack([mean for mean, _ in pairs]).to(wide)
    weights = torch.tensor([weight for _, weight in pairs], dtype=wide).to(device, non_blocking=True)
    numerators = torch.where(weights > 0, means * weights, torch.zeros_like(means))
    parts = iter(torch.stack([numerators, weights], dim=-1).unbind())
    return [(name, next(parts) if type(value) is tuple else value, at) for name, value, at in pending]


def means_of(parts: Tensor) -> Tensor:
    """Numerators / denominators, shape (..., 2); 0 where a denominator is 0."""
    numerators, denominators = parts.unbind(-1)
    return torch.where(denominators > 0, numerators / denominators, torch.zeros_like(numerators))


def values_of(values: Sequence[Any]) -> list[Any]:
    """``values`` with the mean of each part in its place, computed at once."""
    parts = [value for value in values if is_part(value)]
    means = iter(means_of(torch.stack(parts)).unbind() if parts else ())
    return [next(means) if is_part(value) else value for value in values]


def common_keys(
    parts: Mapping[Key, Tensor], alike: Mapping[str, Callable[[], Mapping[str, float]]]
) -> tuple[list[Key], list[str]]:
    """The keys of the parts that every process has put, in one order, and the metrics that only some have put.

    Every process must call it.

    Raises:
        ConfigError: one of the values of ``alike`` differs between processes. Raised on all of them.
    """
    keys = [*parts]
    if dist.get_world_size() == 1:
        return keys, []
    values = {name: value for _, read in sorted(alike.items()) for name, value in read().items()}
    shown = [f"{name} {value:.6g}" for name, value in values.items()]  # computed on several machines: not all bits
    digest = crc32(repr((keys, shown)).encode())
    if sum(dist.largest(digest, -digest)) == 0:  # the largest one is the smallest one
        return keys, []
    gathered = dist.all_gather_object((keys, values))
    _check_alike([values_there for _, values_there in gathered])
    ranks = [keys_of_rank for keys_of_rank, _ in gathered]
    common = set(keys).intersection(*ranks)
    return sorted(common), sorted({name for rank in ranks for name, *_ in set(rank) - common})


def _check_alike(ranks: list[dict[str, float]]) -> None:
    """Raise on every process if two have another value of one name. A process may lack a name."""
    first: dict[str, tuple[int, float]] = {}
    for rank, values in enumerate(ranks):
        for name, there in values.items():
            other, here = first.setdefault(name, (rank, there))
            if not math.isclose(here, there, rel_tol=1e-4):
                raise ConfigError(
                    f"{name}: {here:g} on rank {other}, but {there:g} on rank {rank}. All processes must have the same"
                    " value, or their parts of the model are trained differently; code that changes it must run on"
                    " every process."
                )
