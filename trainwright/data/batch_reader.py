"""BatchReader: from the indices of a batch to the batch. Each sample is read with random numbers of its own.

Seeding three generators takes 7 us a sample, more than many data sets need to read it. So only the first batch is read
with a seed for each sample. If nothing was drawn, later batches are read without seeds, and `SavedGenerators` detects
whether one of them has drawn random numbers. If so, it and all later batches are read with seeds.
"""

import operator
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.utils.data import Subset

from trainwright.data.collate import collate
from trainwright.data.columns import batch_picker
from trainwright.data.errors import DataError
from trainwright.data.sampler import SampleIndices
from trainwright.data.seeding import SAMPLE_STREAM, SavedGenerators, read_state, seed_generators, stream_key

_SHOWN = 64  # indices that a message names at most


class BatchReader:
    """Reads batches, in the process that trains or in a worker, with the same result.

    What a sample draws from the global generators of ``random``, ``numpy.random`` and torch (on the CPU) is a function
    of (seed, epoch, index); what ``collate_fn`` draws, of (seed, epoch, position of the batch), and so is what a data
    set draws that is read by whole batches, with ``__getitems__``. Reading leaves the three generators as they were.

    Errors get a note of the sample, or the batch, that they come from.
    """

    def __init__(self, dataset: Any, collate_fn: Callable[[list[Any]], Any], *, seed: int) -> None:
        self.dataset = dataset
        self.collate_fn = collate_fn
        self._key = stream_key(seed, SAMPLE_STREAM)
        self.pick = batch_picker(dataset, collate_fn)  # None: samples are read, or what __getitems__ gives
        self._reads_batches = _reads_batches(dataset)
        self._draws: bool | None = None  # None: nothing has been read yet
        # While the first batch is read: the state of the generators right after seeding.
        self._seeded: tuple[Any, ...] | None = None

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, indices: SampleIndices) -> Any:
        """The batch of these indices. Torch's loaders call this where it exists, once for each batch."""
        if self.pick is not None:  # nothing can be drawn there
            return self.pick(indices)
        saved = SavedGenerators()
        try:
            if self._draws is False:
                batch = self._read(indices)
                if not saved.has_drawn():
                    return batch
                self._draws = True  # as where one sample in a thousand is changed at random
            return self._read_seeded(indices)
        finally:
            saved.restore()

    def _read(self, indices: SampleIndices) -> Any:
        if self._reads_batches:
            return self._collated(indices, self._fetched(indices))
        dataset, left = self.dataset, iter(indices)
        try:
            samples = [dataset[index] for index in left]
        except Exception as error:
            self._add_sample_note(error, indices, len(indices) - operator.length_hint(left) - 1)
            raise
        return self._collated(indices, samples)

    def _read_seeded(self, indices: SampleIndices) -> Any:
        batch_place = f"{indices.epoch}:{indices.position}"
        if self._reads_batches:
            self._seed(f"fetch:{batch_place}")
            samples = self._fetched(indices)
            self._record_draws()
        else:
            samples = [self._seeded_sample(indices, number) for number in range(len(indices))]
        self._seed(f"collate:{batch_place}")
        batch = self._collated(indices, samples)
        self._record_draws()
        self._draws, self._seeded = bool(self._draws), None
        return batch

    def _seeded_sample(self, indices: SampleIndices, number: int) -> Any:
        self._seed(f"{indices.epoch_of(number)}:{_plain(indices[number])}")
        try:
            sample = self.dataset[indices[number]]
        except Exception as error:
            self._add_sample_note(error, indices, number)
            raise
        self._record_draws()
        return sample

    def _seed(self, place: str) -> None:
        seed_generators(self._key, place)
        if self._draws is None:
            self._seeded = read_state()

    def _record_draws(self) -> None:
        if self._draws is None and self._seeded is not None and read_state() != self._seeded:
            self._draws = True

    def _fetched(self, indices: SampleIndices) -> Any:
        try:
            samples = self.dataset.__getitems__(indices)
        except Exception as error:
            _add_note(error, f"reading {self._shown(indices)}")
            raise
        if self.collate_fn is collate and isinstance(samples, Mapping | Tensor):
            raise DataError(
                f"data: {type(self.dataset).__name__}.__getitems__ gave a {type(samples).__name__}; it must give a list"
                " of samples, or the whole batch with data_collator=lambda batch: batch (collate_fn= of a loader)."
            )
        return samples

    def _collated(self, indices: SampleIndices, samples: Any) -> Any:
        try:
            return self.collate_fn(samples)
        except Exception as error:
            _add_note(error, f"making a batch of {self._shown(indices)}")
            raise

    def _add_sample_note(self, error: Exception, indices: SampleIndices, number: int) -> None:
        what = f"sample {_plain(indices[number])} of {type(self.dataset).__name__}"
        _add_note(error, f"reading {what} (epoch {indices.epoch_of(number)})")

    def _shown(self, indices: SampleIndices) -> str:
        shown = ", ".join(str(_plain(index)) for index in indices[:_SHOWN])
        more = f", … ({len(indices)} in all)" if len(indices) > _SHOWN else ""
        return f"the samples {shown}{more} of {type(self.dataset).__name__} (epoch {indices.epoch})"


def _add_note(error: Exception, doing: str) -> None:
    error.add_note(f"While {doing}.")
    if isinstance(error, StopIteration):  # would end the loop over the loader without a message
        raise DataError(f"data: StopIteration was raised while {doing}.") from error


def _plain(index: Any) -> Any:
    """The same for 3, ``numpy.int64(3)`` and ``torch.tensor(3)``; indices that are no whole numbers as they are."""
    try:
        return operator.index(index)
    except TypeError:
        return index


def _reads_batches(dataset: Any) -> bool:
    """Whether the data set has a ``__getitems__`` of its own. That of torch's Subset calls the one of its data set."""
    while isinstance(dataset, Subset) and type(dataset).__getitems__ is Subset.__getitems__:
        dataset = dataset.dataset
    return callable(getattr(dataset, "__getitems__", None))
