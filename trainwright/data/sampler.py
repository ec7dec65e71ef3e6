"""Samplers: which samples, in which order, on which rank. Orders are pure functions of (seed, epoch, position).

Training sees one infinite stream. Position p lies in epoch ``p // N`` and is sample ``order(epoch)[p % N]``.
Micro-batch k of rank r (of W) holds the ``micro_batch_size`` positions from ``consumed_samples + (k * W + r) *
micro_batch_size`` on. So batches run across epoch ends, nothing is dropped or padded, and the ranks of one step
together hold the same samples for any W.
"""

from collections.abc import Iterator
from numbers import Integral
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Sampler

from trainwright.config.errors import ConfigError
from trainwright.data.errors import DataError
from trainwright.data.indices import SampleIndices
from trainwright.data.seeding import permutation

_BLOCK = 65536  # indices turned into Python ints at a time: a whole epoch at once would delay the first batch


class CyclicSampler(Sampler[list[int]]):
    """An infinite stream of micro-batches of one rank, for training.

    ``len(dataset)`` is all that is asked of the data set; if it says ``supports_prefetch``, its ``prefetch(indices)``
    is called with each micro-batch right before that is handed out. ``len(sampler)`` is the number of steps in which
    an epoch is consumed, ``ceil(N / (micro_batch_size * data_parallel_size))``; iterating never ends.

    Iterating does not move ``consumed_samples``: a loader fetches ahead, so only the trainer knows what was trained
    on. It says so by `set_consumed_samples`, and the next ``iter()`` starts there at the cost of one permutation.

    >>> batches = iter(CyclicSampler(range(5), micro_batch_size=2))
    >>> [next(batches) for _ in range(4)]
    [[0, 1], [2, 3], [4, 0], [1, 2]]
    """

    def __init__(
        self,
        dataset: Any,  # anything with len()
        micro_batch_size: int,
        shuffle: bool = False,
        consumed_samples: int = 0,
        data_parallel_rank: int = 0,
        data_parallel_size: int = 1,
        seed: int = 0,
    ) -> None:
        self.dataset = dataset
        self.data_size = _num_samples("CyclicSampler", dataset)
        _check_counts(
            "CyclicSampler",
            micro_batch_size=(micro_batch_size, 1),
            consumed_samples=(consumed_samples, 0),
            data_parallel_rank=(data_parallel_rank, 0),
            data_parallel_size=(data_parallel_size, 1),
            seed=(seed, 0),
        )
        self.micro_batch_size = micro_batch_size
        self.shuffle = shuffle
        self.consumed_samples = consumed_samples
        self.data_parallel_rank = data_parallel_rank
        self.data_parallel_size = data_parallel_size
        self.seed = seed
        self._shuffled = _Shuffled(self.data_size)

    def set_consumed_samples(self, consumed_samples: int) -> None:
        """Let the next ``iter()`` start behind this many samples of the stream, counted over all ranks."""
        _check_counts("CyclicSampler.set_consumed_samples", consumed_samples=(consumed_samples, 0))
        self.consumed_samples = consumed_samples

    def __len__(self) -> int:
        return _ceil_div(self.data_size, self.micro_batch_size * self.data_parallel_size)

    def __iter__(self) -> Iterator[SampleIndices]:
        prefetch = self.dataset.prefetch if getattr(self.dataset, "supports_prefetch", False) else None
        position = self.consumed_samples + self.data_parallel_rank * self.micro_batch_size
        while True:
            indices = self._indices(position, self.micro_batch_size)
            if prefetch is not None:
                prefetch(indices)
            yield indices
            position += self.micro_batch_size * self.data_parallel_size

    def index_tensors(self) -> Iterator[Tensor]:
        """The batches of ``iter(sampler)``, each int64 (B,): for data that are read by whole batches."""
        size, step = self.micro_batch_size, self.micro_batch_size * self.data_parallel_size
        position = self.consumed_samples + self.data_parallel_rank * size
        while True:
            epoch, offset = divmod(position, self.data_size)
            indices = self.part_of_epoch(epoch, offset, size)
            yield indices if len(indices) == size else torch.tensor(self._indices(position, size), device="cpu")
            position += step

    def _indices(self, position: int, count: int) -> SampleIndices:
        epoch, offset = divmod(position, self.data_size)
        indices = self.indices_of_epoch(epoch, offset, count)
        last = epoch
        while len(indices) < count:  # over the end of an epoch, or of several when the data set is smaller than a batch
            last += 1
            indices += self.indices_of_epoch(last, 0, count - len(indices))
        return SampleIndices(indices, epoch=epoch, position=offset, epoch_length=self.data_size)

    def indices_of_epoch(self, epoch: int, offset: int, count: int) -> list[int]:
        """At most ``count`` indices of one epoch's order, from ``offset`` on."""
        if not self.shuffle:
            return list(range(offset, min(offset + count, self.data_size)))
        part: list[int] = self._shuffled.order(self.seed, epoch)[offset : offset + count].tolist()
        return part

    def part_of_epoch(self, epoch: int, offset: int, count: int) -> Tensor:
        """``indices_of_epoch`` as a tensor: int64 (B,), a view of the epoch's order where it is shuffled."""
        if not self.shuffle:
            return torch.arange(offset, min(offset + count, self.data_size), device="cpu")
        return self._shuffled.tensor(self.seed, epoch)[offset : offset + count]

    def __repr__(self) -> str:
        return (
            f"CyclicSampler({_named(self.dataset)}, micro_batch_size={self.micro_batch_size}, shuffle={self.shuffle}, "
            f"consumed_samples={self.consumed_samples}, data_parallel_rank={self.data_parallel_rank}, "
            f"data_parallel_size={self.data_parallel_size}, seed={self.seed})"
        )


class SingleRoundSampler(Sampler[list[int]]):
    """One pass in micro-batches of one rank, for evaluation.

    Rank r takes the r-th micro-batch of each round, so rank 0, gathering round by round, sees the order of the data
    set. Nothing is padded and nothing comes twice: the last micro-batch may be shorter, and late ranks may have one
    micro-batch less. ``drop_last`` drops that shorter one and nothing else. ``shuffle`` gives the same order in every
    pass, that of epoch 0 under ``seed``.

    >>> [list(SingleRoundSampler(range(5), 2, data_parallel_rank=rank, data_parallel_size=2)) for rank in (0, 1)]
    [[[0, 1], [4]], [[2, 3]]]
    """

    def __init__(
        self,
        dataset: Any,  # anything with len()
        micro_batch_size: int,
        shuffle: bool = False,
        drop_last: bool = False,
        data_parallel_rank: int = 0,
        data_parallel_size: int = 1,
        seed: int = 0,
    ) -> None:
        self.dataset = dataset
        self.data_size = _num_samples("SingleRoundSampler", dataset)
        _check_counts(
            "SingleRoundSampler",
            micro_batch_size=(micro_batch_size, 1),
            data_parallel_rank=(data_parallel_rank, 0),
            data_parallel_size=(data_parallel_size, 1),
            seed=(seed, 0),
        )
        self.micro_batch_size = micro_batch_size
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.data_parallel_rank = data_parallel_rank
        self.data_parallel_size = data_parallel_size
        self.seed = seed
        self._shuffled = _Shuffled(self.data_size)

    def __len__(self) -> int:
        return len(self._batch_numbers())

    def __iter__(self) -> Iterator[SampleIndices]:
        prefetch = self.dataset.prefetch if getattr(self.dataset, "supports_prefetch", False) else None
        for number in self._batch_numbers():
            start = number * self.micro_batch_size
            stop = min(start + self.micro_batch_size, self.data_size)
            part = self._shuffled.order(self.seed, 0)[start:stop].tolist() if self.shuffle else range(start, stop)
            indices = SampleIndices(part, epoch=0, position=start, epoch_length=None)
            if prefetch is not None:
                prefetch(indices)
            yield indices

    def index_tensors(self) -> Iterator[Tensor]:
        """The batches of ``iter(sampler)``, each int64 (B,): for data that are read by whole batches."""
        order = self._shuffled.tensor(self.seed, 0) if self.shuffle else None
        for number in self._batch_numbers():
            start = number * self.micro_batch_size
            stop = min(start + self.micro_batch_size, self.data_size)
            yield torch.arange(start, stop, device="cpu") if order is None else order[start:stop]

    def _batch_numbers(self) -> range:
        if self.drop_last:
            num_batches = self.data_size // self.micro_batch_size
        else:
            num_batches = _ceil_div(self.data_size, self.micro_batch_size)
        return range(self.data_parallel_rank, num_batches, self.data_parallel_size)

    def __repr__(self) -> str:
        return (
            f"SingleRoundSampler({_named(self.dataset)}, micro_batch_size={self.micro_batch_size}, "
            f"shuffle={self.shuffle}, drop_last={self.drop_last}, data_parallel_rank={self.data_parallel_rank}, "
            f"data_parallel_size={self.data_parallel_size}, seed={self.seed})"
        )


class RangedSampler(Sampler[int]):
    """Single indices: ``[start_index, end_index)`` of the data set's order, to resume in the middle of an epoch.

    The whole data set is ordered first (shuffled under ``seed``, or as it is) and cut then, so a later start repeats
    nothing. A start at or behind the end, as after the last batch of an epoch, leaves nothing. ``drop_last`` shortens
    the part to whole batches of ``batch_size``, which has no other effect. ``len(sampler)`` is the number of indices
    that it yields.

    >>> list(RangedSampler(range(10), batch_size=4, start_index=4))
    [4, 5, 6, 7, 8, 9]
    >>> list(RangedSampler(range(10), batch_size=4, start_index=4, drop_last=True))
    [4, 5, 6, 7]
    """

    def __init__(
        self,
        data: Any,  # anything with len()
        batch_size: int,
        start_index: int | None = None,
        end_index: int | None = None,
        drop_last: bool = False,
        shuffle: bool = False,
        seed: int | None = None,
    ) -> None:
        self.data = data
        data_size = _num_samples("RangedSampler", data)
        start = 0 if start_index is None else start_index
        end = data_size if end_index is None else end_index
        _check_counts(
            "RangedSampler",
            batch_size=(batch_size, 1),
            start_index=(start, 0),
            end_index=(end, 0),
            seed=(0 if seed is None else seed, 0),
        )
        if end > data_size:
            raise ConfigError(f"RangedSampler.end_index: got {end}; {_class_name(data)} has only {data_size} samples.")
        if shuffle and seed is None:
            raise ConfigError(
                "RangedSampler.seed: shuffle=True needs a seed, for example seed=0, to have an order to resume."
            )
        self.batch_size = batch_size
        self.start_index = start
        self.end_index = end
        self.drop_last = drop_last
        self.shuffle = shuffle
        self.seed = seed
        num_indices = max(0, end - start)
        self._num_indices = num_indices // batch_size * batch_size if drop_last else num_indices
        self._shuffled = _Shuffled(data_size)

    def __len__(self) -> int:
        return self._num_indices

    def __iter__(self) -> Iterator[int]:
        part = range(self.start_index, self.start_index + self._num_indices)
        if not self.shuffle or self.seed is None:
            yield from part
            return
        order = self._shuffled.order(self.seed, 0)
        for start in range(part.start, part.stop, _BLOCK):
            yield from order[start : min(start + _BLOCK, part.stop)].tolist()

    def __repr__(self) -> str:
        return (
            f"RangedSampler({_named(self.data)}, batch_size={self.batch_size}, start_index={self.start_index}, "
            f"end_index={self.end_index}, drop_last={self.drop_last}, shuffle={self.shuffle}, seed={self.seed})"
        )


class _Shuffled:
    """The permutation of the epoch that was asked for last."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._key: tuple[int, int] | None = None
        self._tensor = torch.empty(0, dtype=torch.int64, device="cpu")
        self._order: npt.NDArray[np.int64] = self._tensor.numpy()

    def order(self, seed: int, epoch: int) -> npt.NDArray[np.int64]:
        if self._key != (seed, epoch):
            self._tensor = permutation(self._length, seed, epoch)
            # A view as an array: cutting a list out of it costs a quarter of cutting it out of a tensor.
            self._order = self._tensor.numpy()
            self._key = (seed, epoch)
        return self._order

    def tensor(self, seed: int, epoch: int) -> Tensor:
        self.order(seed, epoch)
        return self._tensor


def _num_samples(where: str, dataset: Any) -> int:
    try:
        num_samples = len(dataset)
    except TypeError as error:
        raise DataError(
            f"{where}: the data set {_class_name(dataset)} has no len(). Samplers need data that are read by index: "
            "define __len__ and __getitem__."
        ) from error
    if num_samples == 0:
        raise DataError(
            f"{where}: the data set {_class_name(dataset)} is empty (len() is 0). Check its path and split: it "
            "needs one sample at least."
        )
    return num_samples


def _check_counts(where: str, **counts: tuple[Any, int]) -> None:
    """Say in one message which of the values are no whole numbers at or above their minimum."""
    faults = []
    for name, (value, minimum) in counts.items():
        if not isinstance(value, Integral) or isinstance(value, bool) or int(value) < minimum:
            faults.append(
                f"{where}.{name}: got {value!r} ({type(value).__name__}); it must be a whole number >= {minimum}."
            )
    if not faults and "data_parallel_size" in counts:
        rank, size = counts["data_parallel_rank"][0], counts["data_parallel_size"][0]
        if rank >= size:
            faults.append(
                f"{where}.data_parallel_rank: got {rank}; with data_parallel_size={size} it must be below {size}."
            )
    if faults:
        raise ConfigError("\n".join(faults))


def _ceil_div(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)


def _class_name(dataset: object) -> str:
    return type(dataset).__name__


def _named(dataset: Any) -> str:
    return f"<{_class_name(dataset)} of {len(dataset)}>"
