"""Batches of one epoch each."""

from collections.abc import Iterator
from typing import Any

from torch.utils.data import Sampler

from trainwright.data.errors import DataError
from trainwright.data.indices import SampleIndices
from trainwright.data.sampler import CyclicSampler


class EpochSampler(Sampler[list[int]]):
    """Endless batches, none of which holds samples of two epochs: the last one of an epoch may be shorter.

    The order of an epoch is that of :class:`CyclicSampler`, a pure function of (seed, epoch). ``drop_last`` leaves out
    that shorter batch. ``len(sampler)`` is the number of batches of an epoch; iterating never ends, unless ``endless``
    is set to False: then it gives the rest of an epoch, and the next time the next epoch.

    >>> batches = iter(EpochSampler(range(5), batch_size=2))
    >>> [next(batches) for _ in range(4)]
    [[0, 1], [2, 3], [4], [0, 1]]
    """

    def __init__(
        self, dataset: Any, batch_size: int, *, shuffle: bool = False, drop_last: bool = False, seed: int = 0
    ) -> None:
        self._order = CyclicSampler(dataset, batch_size, shuffle, seed=seed)
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        length = self._order.data_size
        self.samples_per_epoch = length // batch_size * batch_size if drop_last else length
        if self.samples_per_epoch == 0:
            raise DataError(
                f"EpochSampler: the data set has {length} samples, fewer than a batch of {batch_size}, and shorter"
                " batches are dropped. Give a smaller batch_size, or drop_last=False (dataloader_drop_last=False)."
            )
        self.endless = True
        self._first_batch = 0

    def set_batches_done(self, batches: int) -> None:
        """Let the next ``iter()`` start behind this many batches, counted from the first epoch on."""
        self._first_batch = batches

    def __len__(self) -> int:
        return -(-self.samples_per_epoch // self.batch_size)

    def __iter__(self) -> Iterator[SampleIndices]:
        prefetch = self.dataset.prefetch if getattr(self.dataset, "supports_prefetch", False) else None
        epoch, batch = divmod(self._first_batch, len(self))
        while True:
            for start in range(batch * self.batch_size, self.samples_per_epoch, self.batch_size):
                count = min(self.batch_size, self.samples_per_epoch - start)
                part = self._order.indices_of_epoch(epoch, start, count)
                indices = SampleIndices(part, epoch=epoch, position=start, epoch_length=None)
                if prefetch is not None:
                    prefetch(indices)
                yield indices
            epoch, batch = epoch + 1, 0
            if not self.endless:
                self._first_batch = epoch * len(self)
                return

    def __repr__(self) -> str:
        order = self._order
        return (
            f"EpochSampler(<{type(self.dataset).__name__} of {order.data_size}>, batch_size={self.batch_size}, "
            f"shuffle={order.shuffle}, drop_last={self.drop_last}, seed={order.seed})"
        )
