"""Several data sets as one, with weights: the source of each sample is a pure function of (seed, epoch, position)."""

import copy
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset, IterableDataset

from trainwright.base.errors import ConfigError, ConfigTypeError
from trainwright.data.errors import data_fault
from trainwright.data.order import Bijection, Indices, Order
from trainwright.data.seeding import ORDER_STREAM, mixed_seed
from trainwright.data.streaming import has_state, is_shared, is_stream, opened, order_of_stream, shard_of_rank
from trainwright.data.wrapped import common_collator


def mixed(given: Any) -> Any:
    """A dict ``{name: (data set, weight)}`` as one data set; anything else as it is.

    Raises:
        ConfigTypeError: a dict by names has an entry without a weight.
    """
    if not (isinstance(given, dict) and given and all(isinstance(name, str) for name in given)):
        return given
    if (fault := data_fault(given)) is not None and not all(map(_is_pair, given.values())):
        raise ConfigTypeError(f"train_dataset: {fault}")
    if unweighted := [name for name, value in given.items() if not _is_pair(value)]:
        raise ConfigTypeError(
            f"Several training data sets: {unweighted[0]!r} has no weight; give {{name: (data set, weight), ...}}, or"
            " join them without weights: torch.utils.data.ConcatDataset([...])."
        )
    datasets, weights = zip(*given.values(), strict=True)
    return (MixedStream if any(map(is_stream, datasets)) else MixedDataset)(datasets, weights)


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2 and isinstance(value[1], int | float)


class MixedDataset(ConcatDataset[Any]):
    """Data sets that give each epoch a share of samples by weight.

    An epoch has ``length`` samples, by default as many as all data sets together. Each data set gives its exact share
    of them, in random places. A data set continues in the next epoch where it was: each of its samples has been used
    before one is used again, however large its share. Unshuffled, the shares follow each other.

    Indices, as samplers give them, are those of the joined data sets.

    Raises:
        ConfigError: a weight is not positive, or a data set is empty.
        ConfigTypeError: a data set has no ``__len__`` or ``__getitem__``. `MixedStream` is for streams.
    """

    datasets: list[Any]  # anything with len() and []

    def __init__(self, datasets: Sequence[Any], weights: Sequence[float], *, length: int | None = None) -> None:
        self.weights = checked_weights(datasets, weights)
        for number, dataset in enumerate(datasets):
            if is_stream(dataset) or not hasattr(dataset, "__len__"):
                raise ConfigTypeError(
                    f"MixedDataset.datasets[{number}]: {type(dataset).__name__} has no __getitem__ and __len__; mix"
                    " streams with MixedStream."
                )
            if len(dataset) == 0:
                raise ConfigError(f"MixedDataset.datasets[{number}]: {type(dataset).__name__} is empty.")
        super().__init__(datasets)
        self.length = self.cumulative_sizes[-1] if length is None else length

    def __len__(self) -> int:
        return self.length

    def sample_order(self, *, shuffle: bool) -> Order:
        """The order of the samples in each epoch, for samplers."""
        return _MixedOrder([*map(len, self.datasets)], shares(self.length, self.weights), shuffle=shuffle)

    def __repr__(self) -> str:
        names = ", ".join(f"<{type(dataset).__name__} of {len(dataset)}>" for dataset in self.datasets)
        return f"MixedDataset([{names}], weights={self.weights}, length={self.length})"


class _MixedOrder:
    def __init__(self, lengths: list[int], counts: list[int], *, shuffle: bool) -> None:
        self._lengths, self._counts, self._shuffle = lengths, counts, shuffle
        self._ends, self._first = np.cumsum(counts), np.cumsum([0, *lengths])
        self._places = Bijection(int(self._ends[-1]))  # which source has which place of an epoch
        self._orders = [Bijection(length) for length in lengths]

    def __call__(self, seed: int, epoch: int, start: int, stop: int) -> Indices:
        places = self._places(seed, epoch, start, stop) if self._shuffle else np.arange(start, stop)
        sources = np.searchsorted(self._ends, places, side="right")
        indices = np.empty(stop - start, np.int64)
        for source, (length, count) in enumerate(zip(self._lengths, self._counts, strict=True)):
            chosen = np.flatnonzero(sources == source)
            # Positions in the source's own stream of samples, over all epochs.
            passes, within = np.divmod(places[chosen] - (self._ends[source] - count) + epoch * count, length)
            if self._shuffle:
                own_seed = mixed_seed(seed, ORDER_STREAM, 0, 0, 0, source)
                for number in np.unique(passes):
                    of_pass = passes == number
                    within[of_pass] = self._orders[source].at(within[of_pass], own_seed, int(number))
            indices[chosen] = within + self._first[source]
        return indices


class MixedStream(IterableDataset[Any]):
    """Streams of which each sample comes from one at random, by weight. It has no end: a stream that ends restarts.

    The choice is a function of seed and position. Its position is those of all streams; a stream without a state reads
    its samples again and drops them.
    """

    is_endless = True

    def __init__(self, datasets: Sequence[Any], weights: Sequence[float], *, seed: int = 0) -> None:
        self.datasets = list(datasets)
        self.weights, self.seed = checked_weights(self.datasets, weights), seed
        self.is_shared_by_workers = all(map(is_shared, self.datasets))
        self._part: tuple[int, ...] = ()
        self._start: dict[str, Any] | None = None
        self._taken, self._passes, self._in_pass = 0, [0] * len(datasets), [0] * len(datasets)

    @property
    def data_collator(self) -> Any:
        """The collator of the streams."""
        return common_collator(self.datasets)

    def shard(self, num_shards: int, index: int) -> "MixedStream":
        """The part ``index`` of ``num_shards`` of each stream."""
        parts = [shard_of_rank(dataset, index, num_shards) for dataset in self.datasets]
        part = MixedStream(parts, self.weights, seed=self.seed)
        part._part = (*self._part, num_shards, index)
        return part

    def identity(self) -> dict[str, Any]:
        """What must be equal on all ranks."""
        own = {"weights": self.weights, "seed": self.seed}
        for number, stream in enumerate(self.datasets):
            own |= {f"{name} of stream {number}": value for name, value in order_of_stream(stream).items()}
        return own

    def state_dict(self) -> dict[str, Any]:
        """The position after the latest sample."""
        states = [stream.state_dict() if has_state(stream) else None for stream in self.datasets]
        return {"taken": self._taken, "passes": [*self._passes], "in_pass": [*self._in_pass], "streams": states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Start the next iteration there."""
        self._start = copy.deepcopy(state)

    def __iter__(self) -> Iterator[Any]:
        zeros = [0] * len(self.datasets)
        state = self._start or {"taken": 0, "passes": zeros, "in_pass": zeros, "streams": zeros}
        self._start = None
        self._taken, self._passes, self._in_pass = state["taken"], [*state["passes"]], [*state["in_pass"]]
        # Now, not with the first sample: a stream that reads samples again may draw, and each batch has its own draws.
        return self._samples([self._opened(number, state["streams"][number]) for number in range(len(self.datasets))])

    def _samples(self, open_streams: list[Iterator[Any]]) -> Iterator[Any]:
        generator = self._generator_at(self._taken)
        while True:
            if self._taken % _DRAWS == 0:
                generator = self._generator_at(self._taken)
            (source,) = generator.choices(range(len(self.datasets)), self.weights)
            try:
                sample = next(open_streams[source])
            except StopIteration:
                if self._in_pass[source] == 0:
                    raise ConfigError(
                        f"MixedStream.datasets[{source}]: {type(self.datasets[source]).__name__} yields no sample."
                    ) from None
                self._passes[source], self._in_pass[source] = self._passes[source] + 1, 0
                open_streams[source] = self._opened(source, None)
                sample = next(open_streams[source])
            self._taken += 1
            self._in_pass[source] += 1
            yield sample

    def _opened(self, source: int, state: Any) -> Iterator[Any]:
        stream, done = self.datasets[source], self._in_pass[source]
        return opened(stream, self._passes[source], done, state if done and has_state(stream) else None)

    def _generator_at(self, taken: int) -> random.Random:
        """The generator of choices, one for each 1024 samples, after the choices that were made with it."""
        block, done = divmod(taken, _DRAWS)
        generator = random.Random(mixed_seed(self.seed, ORDER_STREAM, block, *self._part))
        for _ in range(done):
            generator.random()
        return generator

    def __repr__(self) -> str:
        names = ", ".join(f"<{type(dataset).__name__}>" for dataset in self.datasets)
        return f"MixedStream([{names}], weights={self.weights}, seed={self.seed})"


_DRAWS = 1024  # choices of one generator


def checked_weights(datasets: Sequence[Any], weights: Sequence[float]) -> list[float]:
    """The weights as a list, if there is a positive number for each data set."""
    weights = list(weights)
    if not datasets or len(weights) != len(datasets):
        raise ConfigError(f"weights: got {len(weights)} for {len(datasets)} data sets; give one for each.")
    if any(not isinstance(weight, int | float) or not 0 < weight < float("inf") for weight in weights):
        raise ConfigError(f"weights: got {weights}; each must be a number above 0. Leave out a data set of weight 0.")
    return weights


def shares(total: int, weights: Sequence[float]) -> list[int]:
    """``total`` as whole numbers by weight, with the same sum: largest remainders first.

    >>> shares(10, [1, 1, 1])
    [4, 3, 3]
    """
    exact = [total * weight / sum(weights) for weight in weights]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda number: counts[number] - exact[number])
    for number in by_remainder[: total - sum(counts)]:
        counts[number] += 1
    return counts
