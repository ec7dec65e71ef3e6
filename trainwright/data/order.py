"""Orders of the samples of an epoch: pure functions of (seed, epoch, position), read in parts.

* `Permutation`: an array of all indices, drawn once per epoch; up to `LARGE` samples.
* `Bijection`: computed from the position, a block at a time; nothing is kept that grows with the data set.
* `LengthGroups`: another order, changed so that the samples of a batch have similar lengths.

A data set with an order of its own, as a mixture has, gives it with the method ``sample_order``.
"""

import logging
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from trainwright.base.batch import fields
from trainwright.data.errors import DataError
from trainwright.data.seeding import ORDER_STREAM, mixed_seed, permutation

logger = logging.getLogger("trainwright.data")

Indices = npt.NDArray[np.int64]

LARGE = 1 << 22  # samples; the array of a permutation has 32 MiB there
_BLOCK = 1 << 14  # positions computed at a time
_ROUNDS = 6
_POOL = 64  # batches that are grouped by length together


# The indices at the positions [start, stop) of an epoch, by (seed, epoch, start, stop).
Order = Callable[[int, int, int, int], Indices]


def shuffled_order(length: int) -> Order:
    """The order of a shuffled data set with ``length`` samples."""
    return Permutation(length) if length < LARGE else Bijection(length)


class Permutation:
    """The permutation of an epoch as an array. Keeps that of the last requested epoch."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._key: tuple[int, int] | None = None
        self._indices: Indices = np.empty(0, np.int64)

    def __call__(self, seed: int, epoch: int, start: int, stop: int) -> Indices:
        """A view. As an array: converting it to a list takes a quarter of the time that a tensor takes."""
        if self._key != (seed, epoch):
            self._indices = permutation(self._length, seed, epoch).numpy()
            self._key = (seed, epoch)
        return self._indices[start:stop]


class Bijection:
    """A permutation that is computed from the position: a Feistel network over the next power of 4.

    Results outside of the data set are permuted again until they are inside (cycle walking), which keeps it one to one.
    """

    def __init__(self, length: int) -> None:
        self._length = length
        self._half = np.uint64(max(1, (max(length - 1, 1).bit_length() + 1) // 2))  # bits
        self._block: tuple[int, int, int] | None = None
        self._indices: Indices = np.empty(0, np.int64)

    def __call__(self, seed: int, epoch: int, start: int, stop: int) -> Indices:
        first, last = start // _BLOCK, max(start, stop - 1) // _BLOCK
        if first != last:
            cuts = [start, *((number + 1) * _BLOCK for number in range(first, last)), stop]
            return np.concatenate([self(seed, epoch, a, b) for a, b in pairwise(cuts)])
        if self._block != (seed, epoch, first):
            positions = np.arange(first * _BLOCK, min((first + 1) * _BLOCK, self._length), dtype=np.int64)
            self._indices = self.at(positions, seed, epoch)
            self._block = (seed, epoch, first)
        return self._indices[start - first * _BLOCK : stop - first * _BLOCK]

    def at(self, positions: Indices, seed: int, epoch: int) -> Indices:
        """The indices at any positions of an epoch, in ``[0, length)`` each."""
        keys = [np.uint64(mixed_seed(seed, ORDER_STREAM, epoch, number)) for number in range(_ROUNDS)]
        values = positions.astype(np.uint64)
        outside = np.arange(len(values))
        while len(outside):
            values[outside] = self._permuted(values[outside], keys)
            outside = outside[values[outside] >= self._length]
        return values.astype(np.int64)

    def _permuted(self, values: npt.NDArray[np.uint64], keys: Sequence[np.uint64]) -> npt.NDArray[np.uint64]:
        half, mask = self._half, (np.uint64(1) << self._half) - np.uint64(1)
        left, right = values >> half, values & mask
        for key in keys:
            left, right = right, left ^ (_mixed(right + key) & mask)
        return (left << half) | right


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's output function (Steele et al. 2014): each bit depends on all bits."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def sequential_order(_seed: int, _epoch: int, start: int, stop: int) -> Indices:
    """The order of the data set."""
    return np.arange(start, stop)


def first_epoch(order: Order) -> Order:
    """The order of the first epoch, in each epoch."""
    return lambda seed, _, start, stop: order(seed, 0, start, stop)


class LengthGroups:
    """The order ``base``, changed so that each batch of all ranks has samples of similar length.

    Pools of 64 batches are sorted by length and cut into batches, whose order is random. A pool is computed when a
    position in it is requested. Where the number of samples is no multiple of the batch, the rest of an epoch stays
    as it is; so do the samples that complete the last batch of the epoch before, if batches run across epoch ends.

    Args:
        length: the number of samples of an epoch.
        lengths: the length of each sample, by its index.
        batch_size: that of all ranks together.
        crosses_epochs: whether batches run across epoch ends.
    """

    def __init__(self, base: Order, length: int, lengths: Any, batch_size: int, *, crosses_epochs: bool) -> None:
        self._base, self._length, self._batch_size, self.crosses_epochs = base, length, batch_size, crosses_epochs
        self._lengths = np.asarray(lengths)
        self._pool: tuple[int, int, int] | None = None
        self._indices: Indices = np.empty(0, np.int64)

    def __call__(self, seed: int, epoch: int, start: int, stop: int) -> Indices:
        size, length = self._batch_size, self._length
        head = min(-epoch * length % size if self.crosses_epochs else 0, length)
        end = head + (length - head) // size * size
        parts = []
        while start < stop:
            if start < head or start >= end:
                until = min(stop, head if start < head else length)
                parts.append(self._base(seed, epoch, start, until))
            else:
                number, within = divmod(start - head, size * _POOL)
                first = head + number * size * _POOL
                pool = self._sorted(seed, epoch, first, min(first + size * _POOL, end))
                until = min(stop, first + len(pool))
                parts.append(pool[within : until - first])
            start = until
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _sorted(self, seed: int, epoch: int, first: int, end: int) -> Indices:
        if self._pool != (seed, epoch, first):
            pool = self._base(seed, epoch, first, end)
            batches = pool[np.argsort(self._lengths[pool], kind="stable")].reshape(-1, self._batch_size)
            order = np.random.Generator(np.random.Philox(mixed_seed(seed, ORDER_STREAM, epoch, 1, first)))
            self._indices = batches[order.permutation(len(batches))].ravel()
            self._pool = (seed, epoch, first)
        return self._indices


_LENGTH_FIELDS = ("length", "input_ids", "token_ids", "inputs", "input_features")


def sample_lengths(dataset: Any, by: bool | str) -> Any:
    """The length of each sample, for ``bucket_by_length``; None if ``by`` is False.

    It is the data set's ``lengths``, if it has them, otherwise the field ``by`` of each sample, or its length. With
    True the field is the first of ``length``, ``input_ids``, ``token_ids``, ``inputs``, ``input_features``.
    """
    if not by:
        return None
    if hasattr(dataset, "sample_order"):  # a mixture, whose indices are those of its joined data sets
        return np.concatenate([np.asarray(sample_lengths(part, by)) for part in dataset.datasets])
    lengths = getattr(dataset, "lengths", None)
    if lengths is None:
        logger.info(
            "bucket_by_length: reading the %d samples once for their lengths; an attribute 'lengths' of the data set"
            " avoids that.", len(dataset),
        )  # fmt: skip
        lengths = [_length_of(dataset[index], by, dataset) for index in range(len(dataset))]
    if len(lengths) != len(dataset):
        raise DataError(
            f"bucket_by_length: {type(dataset).__name__}.lengths has {len(lengths)} numbers for {len(dataset)} samples;"
            " it must have one for each."
        )
    return lengths


def _length_of(sample: Any, by: bool | str, dataset: Any) -> int:
    named = fields(sample)
    names = [by] if isinstance(by, str) else _LENGTH_FIELDS
    if named is not None:
        for value in (named[name] for name in names if name in named):
            value = getattr(value, "tensor", value)
            return len(value) if hasattr(value, "__len__") and np.ndim(value) else int(value)
    there = f"the fields {', '.join(map(str, named))}" if named is not None else "no named fields"
    raise DataError(
        f"bucket_by_length: a sample of {type(dataset).__name__} has {there}; needed is"
        f" {' or '.join(map(repr, names))}."
        " Give the data set an attribute 'lengths', one number for each sample, or set bucket_by_length to the name of"
        " a field."
    )
