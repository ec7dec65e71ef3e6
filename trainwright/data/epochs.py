"""Batches of one epoch each."""

from collections.abc import Iterator
from itertools import starmap
from typing import Any

from torch import Tensor
from torch.utils.data import Sampler

from trainwright.data.errors import DataError
from trainwright.data.indices import SampleIndices
from trainwright.data.sampler import CyclicSampler


class EpochSampler(Sampler[list[int]]):
    """An infinite stream of batches that never span two epochs: the last batch of an epoch may be shorter.

    The order of an epoch is that of :class:`CyclicSampler`, a pure function of (seed, epoch). ``drop_last`` drops the
    shorter batch. ``len(sampler)`` is the number of batches per epoch. Iteration is infinite, unless ``infinite`` is
    False: then it yields the rest of the epoch, and the next iteration yields the next epoch.

    With several ranks, ``batch_size`` is that of one of them. Together their n-th batches are the n-th batch of one
    process with ``batch_size * data_parallel_size``, in this order; a shorter one is split evenly. Where it has fewer
    samples than there are ranks, the other ranks get its first sample as padding: ``num_samples`` is then 0.

    >>> batches = iter(EpochSampler(range(5), batch_size=2))
    >>> [next(batches) for _ in range(4)]
    [[0, 1], [2, 3], [4], [0, 1]]
    >>> batches = iter(EpochSampler(range(7), batch_size=2, data_parallel_rank=1, data_parallel_size=2))
    >>> [next(batches) for _ in range(3)]
    [[2, 3], [6], [2, 3]]
    """

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
    ) -> None:
        self._order = CyclicSampler(dataset, batch_size, shuffle, 0, data_parallel_rank, data_parallel_size, seed)
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.data_parallel_rank, self.data_parallel_size = data_parallel_rank, data_parallel_size
        self.global_batch_size = whole = batch_size * data_parallel_size
        length = self._order.data_size
        self.samples_per_epoch = length // whole * whole if drop_last else length
        if self.samples_per_epoch == 0:
            ranks = f" on each of {data_parallel_size} ranks" if data_parallel_size > 1 else ""
            raise DataError(
                f"EpochSampler: the data set has {length} samples, fewer than a batch of {batch_size}{ranks}, and"
                " shorter batches are dropped. Give a smaller batch_size, or drop_last=False"
                " (dataloader_drop_last=False)."
            )
        self.infinite = True
        self._first_batch = 0

    def set_batches_done(self, batches: int) -> None:
        """Start the next ``iter()`` after this many batches, counted from the first epoch."""
        self._first_batch = batches

    def __len__(self) -> int:
        return -(-self.samples_per_epoch // self.global_batch_size)

    def num_samples(self, batch: int) -> int:
        """The number of this rank's samples in a batch, by the batch's number over all epochs; 0: a padding batch."""
        return len(self._share(batch % len(self) * self.global_batch_size))

    def _share(self, start: int) -> range:
        """This rank's positions in the batch of all ranks that begins at position ``start`` of an epoch."""
        rank, size = self.data_parallel_rank, self.data_parallel_size
        count = min(self.global_batch_size, self.samples_per_epoch - start)
        each, more = divmod(count, size)
        first = start + rank * each + min(rank, more)
        return range(first, first + each + (rank < more))

    def __iter__(self) -> Iterator[SampleIndices]:
        prefetch = self.dataset.prefetch if getattr(self.dataset, "supports_prefetch", False) else None
        for epoch, position, count in self._places():
            part = self._order.indices_of_epoch(epoch, position, count)
            indices = SampleIndices(part, epoch=epoch, position=position, epoch_length=None)
            if prefetch is not None:
                prefetch(indices)
            yield indices

    def index_tensors(self) -> Iterator[Tensor]:
        """The batches of ``iter(sampler)``, each int64 (B,): for data that are read by whole batches."""
        return starmap(self._order.part_of_epoch, self._places())

    def _places(self) -> Iterator[tuple[int, int, int]]:
        """Of each batch of this rank the epoch, the position in it, and how many samples."""
        whole, last_whole = self.global_batch_size, self.samples_per_epoch - self.global_batch_size
        own, size = self.data_parallel_rank * self.batch_size, self.batch_size
        epoch, batch = divmod(self._first_batch, len(self))
        while True:
            for start in range(batch * whole, self.samples_per_epoch, whole):
                if start <= last_whole:
                    yield epoch, start + own, size
                else:
                    share = self._share(start) or range(start, start + 1)
                    yield epoch, share.start, len(share)
            epoch, batch = epoch + 1, 0
            if not self.infinite:
                self._first_batch = epoch * len(self)
                return

    def __repr__(self) -> str:
        order, rank, size = self._order, self.data_parallel_rank, self.data_parallel_size
        ranks = f", data_parallel_rank={rank}, data_parallel_size={size}" if size > 1 else ""
        return (
            f"EpochSampler(<{type(self.dataset).__name__} of {order.data_size}>, batch_size={self.batch_size}, "
            f"shuffle={order.shuffle}, drop_last={self.drop_last}, seed={order.seed}{ranks})"
        )
