"""Samplers: which samples, in which order, on which rank. Orders are pure functions of (seed, epoch, position).

Training sees one infinite stream. Position p lies in epoch ``p // N`` and is sample ``order(epoch)[p % N]``.
Micro-batch k of rank r (of W) holds the ``micro_batch_size`` positions from ``consumed_samples + (k * W + r) *
micro_batch_size`` on. So batches run across epoch ends, nothing is dropped or padded, and the ranks of one step
together hold the same samples for any W.
"""

import copy
import inspect
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from numbers import Integral
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler, RandomSampler, Sampler, SubsetRandomSampler, WeightedRandomSampler

from trainwright.base.errors import ConfigError, ConfigTypeError
from trainwright.data.errors import DataError, data_fault
from trainwright.data.order import LengthGroups, Order, first_epoch, sequential_order, shuffled_order

_RANKS = ("data_parallel_rank", "data_parallel_size")
_BLOCK = 65536  # indices turned into Python ints at a time: a whole epoch at once would delay the first batch


class SampleIndices(list[int]):
    """The indices of one batch: a list that knows the ``epoch`` of its first index and its ``position`` in that epoch.

    Positions count the samples of all ranks. An epoch has ``epoch_length`` of them, so a batch may reach into the next
    ones; None for an epoch that ends only where its sampler ends.

    >>> batch = SampleIndices([3, 4, 0], epoch=7, position=3, epoch_length=5)
    >>> batch, [batch.epoch_of(number) for number in range(3)]
    ([3, 4, 0], [7, 7, 8])
    """

    __slots__ = ("epoch", "epoch_length", "position")

    def __init__(self, indices: Iterable[int], *, epoch: int, position: int, epoch_length: int | None) -> None:
        super().__init__(indices)
        self.epoch = epoch
        self.position = position
        self.epoch_length = epoch_length

    def epoch_of(self, number: int) -> int:
        """The epoch of the index at place ``number`` of this batch."""
        if self.epoch_length is None:
            return self.epoch
        return self.epoch + (self.position + number) // self.epoch_length


class _BatchSampler(Sampler[list[int]]):
    """Base of the samplers of batches. A subclass says where its batches lie (`_places`)."""

    _epoch_length: int | None = None  # where a batch may reach into the next epoch
    _first = (0, 0)  # an epoch, and the place where it starts; the epochs from it on have the same length
    _past: tuple[tuple[int, ...], ...] = ()  # for each earlier length: the place where it ends, its `length_state`
    first_known = 0  # the place from which on the lengths are known

    @property
    def _unit(self) -> int:
        """What a micro-batch of all ranks adds to the place: 1 where places are batches."""
        return 1

    def __init__(
        self,
        dataset: Any,  # anything with len()
        shuffle: bool,
        data_parallel_rank: int,
        data_parallel_size: int,
        seed: int,
        lengths: Any = None,
        **counts: tuple[Any, int],
    ) -> None:
        """``counts``: further whole numbers by their names, with their minima, to be checked and kept."""
        name = type(self).__name__
        self.dataset = dataset
        self.data_size = self.num_used = _num_samples(name, dataset)
        _check_counts(
            name,
            **counts,
            data_parallel_rank=(data_parallel_rank, 0),
            data_parallel_size=(data_parallel_size, 1),
            seed=(seed, 0),
        )
        for field, (value, _) in counts.items():
            setattr(self, field, value)
        self.shuffle = shuffle
        self.data_parallel_rank = data_parallel_rank
        self.data_parallel_size = data_parallel_size
        self.seed = seed
        self._order: Order = _order_of(dataset, self.data_size, shuffle)
        if lengths is not None:
            batch_size = next(iter(counts.values()))[0] * data_parallel_size
            crosses = isinstance(self, CyclicSampler)
            self._order = LengthGroups(self._order, self.data_size, lengths, batch_size, crosses_epochs=crosses)

    def ask_length(self) -> bool:
        """Ask the data set for its length, which may have changed; returns whether it has.

        Raises:
            ConfigError: the samples are grouped by their lengths, which were read before.
        """
        size = _num_samples(type(self).__name__, self.dataset)
        if size == self.data_size:
            return False
        if isinstance(self._order, LengthGroups):
            raise ConfigError(
                f"bucket_by_length: the data set {type(self.dataset).__name__} had {self.data_size} samples when their"
                f" lengths were read, and has {size} now. Use a data set of fixed length, or no buckets."
            )
        self.data_size = self.num_used = size
        self._order = _order_of(self.dataset, size, self.shuffle)
        return True

    def _change_length(self, place: int) -> bool:
        """Ask for the length of the epochs from ``place`` on; returns whether it has changed."""
        past = (place, *self.length_state)
        has_changed = self.ask_length()
        if has_changed:
            self._past = (*(one for one in self._past if one[0] < place), past)
            if hasattr(self.dataset, "sample_order"):  # it has the order of now only
                self.first_known = place
        return has_changed

    @property
    def length_state(self) -> list[int]:
        """The first epoch of the current length, the place where it starts, and the length of the data set."""
        return [*self._first, self.data_size]

    def load_length_state(self, state: Sequence[int]) -> None:
        """Use a ``length_state``: nothing is known of lengths before it."""
        epoch, before, size = state
        self._first, self.data_size, self.num_used = (epoch, before), size, size
        self._order = _order_of(self.dataset, size, self.shuffle)
        self._use_length()
        self._past, self.first_known = (), before if epoch else 0

    def _use_length(self) -> None:
        """Compute what depends on the length of the data set."""

    def _places(self) -> Iterator[tuple[int, int, int]]:
        """For each batch of this rank: the epoch, the position in it, and the number of samples."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[SampleIndices]:
        prefetch = self.dataset.prefetch if getattr(self.dataset, "supports_prefetch", False) else None
        for epoch, position, size in self._places():
            part = self._indices(epoch, position, size)
            indices = SampleIndices(part, epoch=epoch, position=position, epoch_length=self._epoch_length)
            if prefetch is not None:
                prefetch(indices)
            yield indices

    def index_tensors(self) -> Iterator[Tensor]:
        """The batches of ``iter(sampler)``, each int64 (B,): for data that are read by whole batches."""
        for epoch, position, size in self._places():
            stop = position + size
            if stop > self.num_used:
                yield torch.tensor(self._indices(epoch, position, size), device="cpu")
            else:
                yield torch.from_numpy(self._order(self.seed, epoch, position, stop))

    def micro_batches(self, first: int, number: int) -> list[list[int]]:
        """The indices of ``number`` micro-batches of all ranks together. Nothing is read or prefetched.

        ``first``: the place of the first one, as the sampler's ``set_…`` method takes it.
        """
        places = [self._joined(first + at * self._unit) for at in range(number)]
        return [joined._indices(*next(joined._places())) for joined in places]

    def indices_at(self, first: int, number: int) -> SampleIndices:
        """One of these micro-batches, as a loader reads it."""
        return next(iter(self._joined(first + number * self._unit)))

    def _joined(self, first: int) -> Self:
        """A copy that yields the micro-batches of all ranks from ``first`` on, by the length of the data there."""
        joined = copy.copy(self)
        past = next((one for one in self._past if first < one[0]), None)
        if past is not None:
            joined.load_length_state(past[1:])
        joined._join_ranks(first)
        return joined

    def _join_ranks(self, first: int) -> None:
        """Yield the micro-batches of all ranks as those of one, from ``first`` on."""
        raise NotImplementedError

    def _indices(self, epoch: int, position: int, size: int) -> list[int]:
        indices: list[int] = []
        while len(indices) < size:  # over the end of an epoch, or of several if the data set is smaller than a batch
            stop = min(position + size - len(indices), self.num_used)
            indices += self._order(self.seed, epoch, position, stop).tolist()
            epoch, position = epoch + 1, 0
        return indices


class CyclicSampler(_BatchSampler):
    """An infinite stream of micro-batches of one rank, for training.

    Only ``len(dataset)`` is required. If the data set has ``supports_prefetch``, its ``prefetch(indices)`` is called
    right before each micro-batch is yielded. ``len(sampler)`` is the number of steps that consume an epoch,
    ``ceil(N / (micro_batch_size * data_parallel_size))``; iteration never ends.

    Iteration does not change ``consumed_samples``: a loader reads ahead, so only the trainer knows what was trained
    on. It calls `set_consumed_samples`, and the next ``iter()`` starts there at the cost of one permutation. It also
    calls `begin_epoch`, which asks the data set for its length: if it has changed, an epoch of all samples starts.

    ``lengths``, one number for each sample, groups samples of similar length: see :class:`~.order.LengthGroups`.

    >>> batches = iter(CyclicSampler(range(5), micro_batch_size=2))
    >>> [next(batches) for _ in range(4)]
    [[0, 1], [2, 3], [4, 0], [1, 2]]
    """

    micro_batch_size: int
    consumed_samples: int

    def __init__(
        self,
        dataset: Any,
        micro_batch_size: int,
        shuffle: bool = False,
        consumed_samples: int = 0,
        data_parallel_rank: int = 0,
        data_parallel_size: int = 1,
        seed: int = 0,
        lengths: Any = None,
    ) -> None:
        super().__init__(
            dataset,
            shuffle,
            data_parallel_rank,
            data_parallel_size,
            seed,
            lengths,
            micro_batch_size=(micro_batch_size, 1),
            consumed_samples=(consumed_samples, 0),
        )
        self._epoch_length = self.data_size
        self._limit: int | float | None = None
        self._keeps_batches = False

    def begin_epoch(self, consumed_samples: int) -> None:
        """An epoch starts after this many samples of the stream; its length is that of the data set now."""
        epoch = self.epoch_at(consumed_samples)
        if self._change_length(consumed_samples):
            self._first = epoch, consumed_samples
            self._use_length()

    def epoch_at(self, consumed_samples: int) -> int:
        """The epoch of the next sample, from 0."""
        return self._first[0] + (consumed_samples - self._first[1]) // self.num_used

    def place_at(self, consumed_samples: int) -> int:
        """The place of the next sample in its epoch."""
        return (consumed_samples - self._first[1]) % self.num_used

    def set_consumed_samples(self, consumed_samples: int) -> None:
        """Start the next ``iter()`` after this many samples of the stream, counted over all ranks."""
        _check_counts("CyclicSampler.set_consumed_samples", consumed_samples=(consumed_samples, 0))
        self.consumed_samples = consumed_samples

    def limit_epochs(self, num_batches: int | float, *, keeps_batches: bool = False) -> int:
        """Use only the first batches of each epoch, by their number or share; returns the samples of an epoch.

        ``keeps_batches``: the same batches in each epoch, in the order of the data set.
        """
        self._limit, self._keeps_batches = num_batches, keeps_batches
        self._use_length()
        return self.num_used

    def _use_length(self) -> None:
        whole, keeps_batches = self.micro_batch_size * self.data_parallel_size, self._keeps_batches
        self.num_used = self._epoch_length = min(self.data_size, limited(len(self), self._limit) * whole)
        if keeps_batches:
            self._order = first_epoch(_order_of(self.dataset, self.data_size, False))
        elif isinstance(self._order, LengthGroups) and self.num_used < self.data_size:
            self._order.crosses_epochs = False  # an epoch now has complete batches only

    def _join_ranks(self, first: int) -> None:
        self.set_consumed_samples(first)
        self.micro_batch_size *= self.data_parallel_size
        self.data_parallel_rank, self.data_parallel_size = 0, 1

    @property
    def _unit(self) -> int:
        return self.micro_batch_size * self.data_parallel_size

    def __len__(self) -> int:
        return -(-self.num_used // self._unit)

    def num_samples(self, batch: int) -> int:
        """The number of this rank's samples in each batch."""
        return self.micro_batch_size

    def _places(self) -> Iterator[tuple[int, int, int]]:
        size, (first, before) = self.micro_batch_size, self._first
        start = self.consumed_samples - before + self.data_parallel_rank * size
        for position in count(start, size * self.data_parallel_size):
            epoch, place = divmod(position, self.num_used)
            yield first + epoch, place, size

    def __repr__(self) -> str:
        return _repr(self, self.dataset, "micro_batch_size", "shuffle", "consumed_samples", *_RANKS, "seed")


class SingleRoundSampler(_BatchSampler):
    """One pass in micro-batches of one rank, for evaluation.

    Rank r takes the r-th micro-batch of each round, so rank 0, gathering round by round, sees the order of the data
    set. There is no padding and no repeated sample: the last micro-batch may be shorter, and late ranks may have one
    micro-batch less. ``drop_last`` drops only that shorter one. ``shuffle`` gives the same order in every pass, that
    of epoch 0 under ``seed``.

    >>> [list(SingleRoundSampler(range(5), 2, data_parallel_rank=rank, data_parallel_size=2)) for rank in (0, 1)]
    [[[0, 1], [4]], [[2, 3]]]
    """

    micro_batch_size: int

    def __init__(
        self,
        dataset: Any,
        micro_batch_size: int,
        shuffle: bool = False,
        drop_last: bool = False,
        data_parallel_rank: int = 0,
        data_parallel_size: int = 1,
        seed: int = 0,
    ) -> None:
        super().__init__(
            dataset, shuffle, data_parallel_rank, data_parallel_size, seed, micro_batch_size=(micro_batch_size, 1)
        )
        self.drop_last = drop_last

    def __len__(self) -> int:
        return len(self._starts())

    def _places(self) -> Iterator[tuple[int, int, int]]:
        for start in self._starts():
            yield 0, start, min(self.micro_batch_size, self.data_size - start)

    def num_samples(self, batch: int) -> int:
        """The number of samples in a batch of this rank, by the batch's number."""
        start = (self.data_parallel_rank + batch * self.data_parallel_size) * self.micro_batch_size
        return max(0, min(self.micro_batch_size, self.data_size - start))

    def index_at(self, position: int) -> int:
        """The index of the sample at a position of the pass of all ranks."""
        return self._indices(0, position, 1)[0]

    def _starts(self) -> range:
        self.ask_length()
        size = self.micro_batch_size
        stop = self.data_size // size * size if self.drop_last else self.data_size
        return range(self.data_parallel_rank * size, stop, self.data_parallel_size * size)

    def __repr__(self) -> str:
        return _repr(self, self.dataset, "micro_batch_size", "shuffle", "drop_last", *_RANKS, "seed")


class EpochSampler(_BatchSampler):
    """An infinite stream of batches that never span two epochs: the last batch of an epoch may be shorter.

    The order of an epoch is that of :class:`CyclicSampler`, a pure function of (seed, epoch). ``drop_last`` drops the
    shorter batch. ``len(sampler)`` is the number of batches per epoch. Iteration is infinite, unless ``infinite`` is
    False: then it yields the rest of the epoch, and the next iteration yields the next epoch.

    With several ranks, ``batch_size`` is that of one of them. Together their n-th batches are the n-th batch of one
    process with ``batch_size * data_parallel_size``, in this order; a shorter one is split evenly. Where it has fewer
    samples than there are ranks, the other ranks get its first sample as padding: ``num_samples`` is then 0.

    ``lengths``, one number for each sample, groups samples of similar length: see :class:`~.order.LengthGroups`.
    ``limit``, a number or share of batches, shortens each epoch; with ``keeps_batches`` all epochs have the same ones.

    >>> batches = iter(EpochSampler(range(5), batch_size=2))
    >>> [next(batches) for _ in range(4)]
    [[0, 1], [2, 3], [4], [0, 1]]
    >>> batches = iter(EpochSampler(range(7), batch_size=2, data_parallel_rank=1, data_parallel_size=2))
    >>> [next(batches) for _ in range(3)]
    [[2, 3], [6], [2, 3]]
    """

    batch_size: int

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        shuffle: bool = False,
        drop_last: bool = False,
        seed: int = 0,
        data_parallel_rank: int = 0,
        data_parallel_size: int = 1,
        lengths: Any = None,
        limit: int | float | None = None,
        keeps_batches: bool = False,
    ) -> None:
        super().__init__(
            dataset, shuffle, data_parallel_rank, data_parallel_size, seed, lengths, batch_size=(batch_size, 1)
        )
        self.drop_last, self._limit, self._keeps_batches = drop_last, limit, keeps_batches
        self.global_batch_size = batch_size * data_parallel_size
        self.infinite = True
        self._first_batch = 0
        self._use_length()

    def begin_epoch(self, epoch: int, batches: int) -> None:
        """Epoch ``epoch`` starts after this many batches; its length is that of the data set now."""
        has_changed = self._change_length(batches)
        self._first = epoch, batches
        if has_changed:
            self._use_length()

    def epoch_of(self, batches: int) -> tuple[int, int, int]:
        """The epoch of the batch that follows so many, the batches before this epoch, and its samples."""
        joined = self._joined(batches)
        epochs, batch = divmod(batches - joined._first[1], len(joined))
        return joined._first[0] + epochs, batches - batch, joined.samples_per_epoch

    def _use_length(self) -> None:
        whole = self.global_batch_size
        if self._keeps_batches:
            self._order = first_epoch(self._order)
        self.samples_per_epoch = self.data_size // whole * whole if self.drop_last else self.data_size
        if self.samples_per_epoch == 0:
            ranks = f" on each of {self.data_parallel_size} ranks" if self.data_parallel_size > 1 else ""
            raise DataError(
                f"batch_size: the training data have {self.data_size} samples, fewer than a batch of {self.batch_size}"
                f"{ranks}, and a last batch that is not complete is left out. Set a smaller batch_size, or"
                " dataloader_drop_last=False (drop_last=False of an EpochSampler)."
            )
        if self._limit is not None:
            self.samples_per_epoch = min(self.samples_per_epoch, limited(len(self), self._limit) * whole)

    def set_batches_done(self, batches: int) -> None:
        """Start the next ``iter()`` after this many batches of all epochs; not before that of ``begin_epoch``."""
        self._first_batch = batches

    def _join_ranks(self, first: int) -> None:
        self.set_batches_done(first)
        self.batch_size, self.data_parallel_rank, self.data_parallel_size = self.global_batch_size, 0, 1
        self.infinite = True

    def __len__(self) -> int:
        return -(-self.samples_per_epoch // self.global_batch_size)

    def num_samples(self, batch: int) -> int:
        """The number of this rank's samples in a batch, by the batch's number in its epoch; 0: a padding batch."""
        start = batch % len(self) * self.global_batch_size
        is_complete = start + self.global_batch_size <= self.samples_per_epoch
        return self.batch_size if is_complete else len(self._share(start))

    def _share(self, start: int) -> range:
        """This rank's positions in the batch of all ranks that begins at position ``start`` of an epoch."""
        rank, size = self.data_parallel_rank, self.data_parallel_size
        each, more = divmod(min(self.global_batch_size, self.samples_per_epoch - start), size)
        first = start + rank * each + min(rank, more)
        return range(first, first + each + (rank < more))

    def _places(self) -> Iterator[tuple[int, int, int]]:
        whole, last_whole = self.global_batch_size, self.samples_per_epoch - self.global_batch_size
        own, size = self.data_parallel_rank * self.batch_size, self.batch_size
        first, before = self._first
        epoch, batch = divmod(self._first_batch - before, len(self))
        epoch += first
        while True:
            for start in range(batch * whole, self.samples_per_epoch, whole):
                if start <= last_whole:
                    yield epoch, start + own, size
                else:
                    share = self._share(start) or range(start, start + 1)
                    yield epoch, share.start, len(share)
            epoch, batch = epoch + 1, 0
            if not self.infinite:
                self._first_batch = before + (epoch - first) * len(self)
                return

    def __repr__(self) -> str:
        ranks = _RANKS if self.data_parallel_size > 1 else ()
        return _repr(self, self.dataset, "batch_size", "shuffle", "drop_last", "seed", *ranks)


def limited(num_batches: int, limit: int | float | None) -> int:
    """How many of ``num_batches`` a limit leaves: at most an int, a share (rounded down, at least one) for a float.

    >>> limited(10, 4), limited(10, 40), limited(10, 0.29), limited(10, 0.01), limited(100, 0.29)
    (4, 10, 2, 1, 29)
    """
    if limit is None:
        return num_batches
    if isinstance(limit, float):
        limit = max(1, int(num_batches * limit + 1e-9))  # 0.29 * 100 is 28.999…
    return min(num_batches, limit)


class RangedSampler(Sampler[int]):
    """Single indices: ``[start_index, end_index)`` of the data set's order, to resume in the middle of an epoch.

    The whole data set is ordered first (shuffled under ``seed``, or as it is) and then cut, so a later start repeats
    no sample. A start at or behind the end, as after the last batch of an epoch, leaves nothing. ``drop_last`` shortens
    the part to full batches of ``batch_size``, which has no other effect. ``len(sampler)`` is the number of indices
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
            raise ConfigError(
                f"RangedSampler.end_index: got {end}; {type(data).__name__} has only {data_size} samples."
            )
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
        self._order = _order_of(data, data_size, shuffle)

    def __len__(self) -> int:
        return self._num_indices

    def __iter__(self) -> Iterator[int]:
        part = range(self.start_index, self.start_index + self._num_indices)
        if not self.shuffle or self.seed is None:
            yield from part
            return
        for start in range(part.start, part.stop, _BLOCK):
            yield from self._order(self.seed, 0, start, min(start + _BLOCK, part.stop)).tolist()

    def __repr__(self) -> str:
        return _repr(self, self.data, "batch_size", "start_index", "end_index", "drop_last", "shuffle", "seed")


_RANDOM = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


def sampler_of(loader: Any) -> Any:
    """What orders the samples of a loader: its sampler of batches, or that of samples inside of it."""
    batches = getattr(loader, "batch_sampler", None)
    batches = getattr(batches, "batch_sampler", batches)  # of the rounds of a BatchLoader
    return getattr(loader, "sampler", None) if batches is None else getattr(batches, "sampler", batches)


def is_drawn_by_process(loader: Any) -> bool:
    """Whether the random generator of each process draws the order of a loader."""
    sampler = sampler_of(loader)
    return isinstance(sampler, _RANDOM) and sampler.generator is None


def is_shuffled(loader: Any) -> bool:
    """Whether the sampler of a loader draws its order, as far as it shows."""
    sampler = sampler_of(loader)
    return isinstance(sampler, _RANDOM) or getattr(sampler, "shuffle", None) is True


def is_in_order(loader: Any) -> bool:
    """Whether a loader yields samples in the order of its data set, as far as its sampler shows."""
    sampler = sampler_of(loader)
    is_interleaved = isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1
    is_grouped = isinstance(sampler, _BatchSampler) and isinstance(sampler._order, LengthGroups)
    return not (is_shuffled(loader) or is_interleaved or is_grouped)


def _order_of(dataset: Any, length: int, shuffle: bool) -> Order:
    if hasattr(dataset, "sample_order"):
        order: Order = dataset.sample_order(shuffle=shuffle)
        return order
    return shuffled_order(length) if shuffle else sequential_order


def _num_samples(where: str, dataset: Any) -> int:
    if (fault := data_fault(dataset)) is not None:
        raise ConfigTypeError(f"data: {fault}")
    try:
        num_samples = len(dataset)
    except TypeError as error:
        if hasattr(dataset, "__len__"):
            raise DataError(f"{where}: len() of the data set {type(dataset).__name__} failed: {error}.") from error
        fix = "define __len__ and __getitem__."
        if inspect.isfunction(dataset):
            fix += " For a generator function, pass an object whose __iter__ is the generator (a stream)."
        raise DataError(
            f"{where}: the data set {type(dataset).__name__} has no len(). Samplers need data that are read by index: "
            + fix
        ) from error
    refuse_empty(where, dataset)
    return num_samples


def refuse_empty(where: str, dataset: Any) -> None:
    """Raise for a data set of no samples. ``where``: the argument or the setting that it is given as."""
    try:
        is_empty = len(dataset) == 0
    except (TypeError, NotImplementedError):  # a stream
        return
    if is_empty:
        raise DataError(
            f"{where}: the data set {type(dataset).__name__} is empty (len() is 0). Check its path and split: it "
            "needs at least one sample."
        )


def _check_counts(where: str, **counts: tuple[Any, int]) -> None:
    """Raise one error about all values that are not whole numbers at or above their minimum."""
    faults = [
        f"{where}.{name}: got {value!r} ({type(value).__name__}); it must be a whole number >= {minimum}."
        for name, (value, minimum) in counts.items()
        if not isinstance(value, Integral) or isinstance(value, bool) or int(value) < minimum
    ]
    if not faults and "data_parallel_size" in counts:
        rank, size = counts["data_parallel_rank"][0], counts["data_parallel_size"][0]
        if rank >= size:
            faults.append(
                f"{where}.data_parallel_rank: got {rank}; with data_parallel_size={size} it must be below {size}."
            )
    if faults:
        raise ConfigError("\n".join(faults))


def _repr(sampler: object, data: Any, *names: str) -> str:
    fields = ", ".join(f"{name}={getattr(sampler, name)!r}" for name in names)
    return f"{type(sampler).__name__}(<{type(data).__name__} of {len(data)}>, {fields})"
