"""What a sampler yields: the indices of a batch, and where in the run's data they lie."""

from collections.abc import Iterable, Iterator
from typing import Any


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


class Rounds:
    """A batch sampler whose plain lists become `SampleIndices`: their epoch is the round, 0 for the first.

    Lists that know their place already stay as they are.
    """

    def __init__(self, batch_sampler: Any) -> None:
        self.batch_sampler = batch_sampler
        self.round = -1  # set by the loader, not counted here: torch may call iter() twice for one round

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[SampleIndices]:
        epoch, position = self.round, 0
        for indices in self.batch_sampler:
            placed = indices
            if not isinstance(indices, SampleIndices):
                placed = SampleIndices(indices, epoch=epoch, position=position, epoch_length=None)
                position += len(placed)
            yield placed
