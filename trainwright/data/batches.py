"""The batches of a training, read one epoch after another: the position in the data, epochs, workers, prefetching.

An epoch is opened by the first batch that is read in it, so whatever prepares its data, such as ``on_epoch_begin``,
comes first: neither workers nor prefetching read beyond the end of an epoch before.
"""

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain, cycle, islice
from typing import Any

import torch
from torch.utils.data import DataLoader

from trainwright.base.errors import ConfigError
from trainwright.checkpoint.rehearsal import VALUES, described
from trainwright.data.batch_loader import BatchLoader, epoch_setters, opened, workers_started
from trainwright.data.prefetch import ahead
from trainwright.data.sample_count import SampleCounter
from trainwright.data.sampler import CyclicSampler, EpochSampler
from trainwright.data.seeding import (
    generator_state,
    is_generator,
    kept_generators,
    random_state,
    set_generator_state,
    set_random_state,
)
from trainwright.data.streaming import StreamLoader, has_state, log_shuffle_buffer

logger = logging.getLogger("trainwright.data")

_END = object()


class Batches(Iterator[Any]):
    """The batches of a loader, repeated forever. Iterated it gives those of the loader; ``next`` gives them prepared.

    A sampler, a batch sampler, the sampler inside of it and a data set that have ``set_epoch`` get the number of each
    epoch, from 0. Workers that the loader keeps are started again for an epoch if ``may_change``.

    Args:
        loader: one of ours, a torch DataLoader, or any object whose ``__iter__`` restarts.
        prepare: called with each batch by ``next``.
        length: the batches of each epoch; None: those of one iteration of the loader.
        measure: returns the batches of an epoch of the loader; called at the start of each, in place of ``length``.
        prefetches_to: the device to which each batch is copied while the previous step computes; None: the batches are
            those of the loader. Without effect for a loader with a state of its own, and on a device without streams.
        may_change: returns whether the user's code may have changed the data since the workers were started.
        renew: returns the loader of an epoch that begins; None: ``loader`` is iterated again. Needs ``measure``.

    Attributes:
        done: the batches of the run so far, those of earlier starts included.
        length: the batches of the current epoch; None: those of one iteration of the loader.
        begin_epoch: called where an epoch begins, when its length is known.
        divide: called with each batch that is read, before it is copied to a device; None: not needed.
        compare_reads: called with the first samples of a stream that all ranks read, after the first batch of a run.

    Raises:
        ConfigError: an iteration of the loader has fewer than ``length`` batches, or two iterations have none.
    """

    def __init__(
        self,
        loader: Any,
        *,
        prepare: Callable[[Any], Any] = lambda batch: batch,
        length: int | None = None,
        measure: Callable[[Any], int] | None = None,
        prefetches_to: torch.device | None = None,
        may_change: Callable[[], bool] = lambda: False,
        renew: Callable[[], Any] | None = None,
    ) -> None:
        self.loader, self.prepare, self.length, self.may_change = loader, prepare, length, may_change
        self.measure, self._renew = measure, renew
        self.begin_epoch: Callable[[], object] = bool
        self._cycle: tuple[int, int] | None = None  # the sampler's position when `done` had the second number
        self._opened: dict[str, Any] | None = None  # the random generators when the latest epoch was opened
        self._continued: dict[str, Any] | None = None  # a loaded state
        self._fresh = False  # whether the loader of each epoch has generators of its own
        self._counter = SampleCounter(loader)
        self._epoch_start: int | None = None  # `done` where the epoch begins; None: nothing has been read
        self._next_epoch: tuple[int, int] | None = None  # the epoch to open, and `done` at its start; None: by `length`
        self._read_length = 0  # the batches of an iteration of the loader when its epoch was opened; 0: unknown
        self._varies = False  # whether iterations of the loader have had different lengths
        self.prefetches_to = prefetches_to
        self.divide: Callable[[Any], Any] | None = None
        self.compare_reads: Callable[[Any], object] | None = None
        self.done = 0
        self._keeps_generators = self._is_positioned = False
        self._was_infinite = getattr(source_of(loader), "infinite", True)
        self._stream: tuple[int, int] | None = None  # the stream's number of batches when `done` had the second number
        self._opening: Iterator[Iterator[Any]] | None = None  # the epochs from the current one on
        self._reading: Iterator[Any] = iter(())
        self._repeated: list[Any] = []

    def start(
        self,
        done: int,
        *,
        epoch: tuple[int, int] | None = None,
        is_positioned: bool = False,
        keeps_generators: bool | None = None,
    ) -> None:
        """Start after ``done`` batches of the run. Nothing is read yet.

        ``epoch``: the number of the epoch, and the batches before it; None: that of epochs of equal lengths.
        ``is_positioned``: the loader is there already, as after ``load_state``; otherwise earlier batches are read and
        dropped if it cannot be set to a position. ``keeps_generators``: opening the loader leaves the random
        generators, whose state was saved later, as they are; by default if it starts within an epoch.
        """
        self._stop_reading()
        self._cycle = self._epoch_start = None
        self._next_epoch, self._read_length = epoch, 0
        self.done, self._is_positioned = done, self._is_positioned or is_positioned
        within = done - epoch[1] if epoch is not None else done % self.length if self.length else done
        self._keeps_generators = self._is_positioned or bool(within) if keeps_generators is None else keeps_generators
        sampler = getattr(self.loader, "batch_sampler", None)
        if isinstance(sampler, EpochSampler) and self.length is not None:  # also for code that iterates the loader
            sampler.infinite = False
            if epoch is not None:
                sampler.begin_epoch(*epoch)
            sampler.set_batches_done(done)

    def __next__(self) -> Any:
        while (batch := next(self._reading, _END)) is _END:
            self.open()
        self.done += 1
        return batch

    def next(self) -> Any:
        """The next batch, prepared."""
        while (batch := next(self._reading, _END)) is _END:
            self.open()
        batch = self.prepare(batch)
        self.done += 1
        return batch

    def open(self) -> None:
        """Open the next epoch, or after ``start`` the current one: ask for its length. No batch is read yet."""
        if self._repeated:
            repeated = map(copy.deepcopy, cycle(self._repeated))
            self._reading = repeated if self.divide is None else map(self.divide, repeated)
            return
        source = source_of(self.loader)
        if self._opening is None:
            self._opening = self._epochs(source) if self._renew is None else self._epochs_of_new_loaders(self._renew)
        batches = next(self._opening)
        device, source = self.prefetches_to, source_of(self.loader)
        # The own state of a loader would count a batch that is read ahead as used.
        may_prefetch = isinstance(source, StreamLoader) or not has_state(source)
        parts = batches if self.divide is None else map(self.divide, batches)
        self._reading = parts if device is None or not may_prefetch else ahead(parts, device)

    def count(self, batch: Any) -> int:
        """The samples of the latest batch that was read, in the form that ``batch`` has."""
        return self._counter(batch, None if self._epoch_start is None else self.done - self._epoch_start - 1)

    def planned(self, done: int) -> int | None:
        """The samples that the sampler has planned for the batch after which ``done`` are done; None: unknown."""
        return self._counter.planned(None if self._epoch_start is None else done - self._epoch_start - 1)

    @property
    def can_read_again(self) -> bool:
        """Whether an earlier batch can be read again: the loader is ours, and its sampler knows all orders."""
        sampler = getattr(self.loader, "batch_sampler", None)
        return isinstance(self.loader, BatchLoader) and isinstance(sampler, EpochSampler | CyclicSampler)

    def first(self, number: int) -> list[Any]:
        """The first batches of the loader, as it gives them."""
        found = list(islice(opened(self.loader), number))
        self.close()
        return found

    def repeat(self, batches: Sequence[Any]) -> None:
        """Give copies of these batches from now on, again and again."""
        self._repeated = list(batches)
        self._stop_reading()

    def close(self) -> None:
        """Stop reading, and end the workers of our loaders."""
        self._stop_reading()
        source = source_of(self.loader)
        if isinstance(source, StreamLoader):
            source.infinite = self._was_infinite
        if isinstance(self.loader, BatchLoader):
            self.loader.close()

    def state(self) -> dict[str, Any] | None:
        """The position of a loader that has one to save, after the latest batch given; None: it has none.

        Of another one that is not ours: the random generators that its epoch was opened with, and its own ones now.
        """
        source = source_of(self.loader)
        if isinstance(source, StreamLoader):
            return source.state_dict(self._num_of_stream())
        if has_state(source):
            return dict(source.state_dict())
        if self._opened is None:
            return self._state_of_cycle() or self._continued
        return {**self._opened, "now": [generator_state(one) for one in _generators(source)]}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue the loader, if it can, at a position that was saved."""
        self._stop_reading()
        self._stream, self._next_epoch, source = None, None, source_of(self.loader)
        if "lengths" in state:
            sampler = getattr(source, "batch_sampler", None)
            if isinstance(sampler, CyclicSampler):
                sampler.load_length_state(state["lengths"])
        elif has_state(source):
            source.load_state_dict(state)
            self._is_positioned = self._keeps_generators = True
        elif "opened" in state:
            self._continued = state

    def rehearse(self) -> None:
        """Compare the next batch with that of a copy of the stream, continued at its saved position."""
        source, reading = source_of(self.loader), self._reading
        if not isinstance(source, StreamLoader) or self._opening is None or self.divide is not None:
            return
        if (peeked := source.peek(self._num_of_stream())) is not None:
            expected = described(peeked, VALUES)
            self._reading = chain(
                map(partial(_compared, type(source.dataset).__name__, expected), islice(reading, 1)), reading
            )

    def _stop_reading(self) -> None:
        self._opening, self._reading = None, iter(())

    def _state_of_cycle(self) -> dict[str, Any] | None:
        """The lengths of the data set so far, if they have changed: a position in samples does not tell its epoch."""
        sampler = getattr(self.loader, "batch_sampler", None)
        if not (isinstance(self.loader, BatchLoader) and isinstance(sampler, CyclicSampler)):
            return None
        return {"lengths": sampler.length_state} if sampler.length_state[0] else None

    def _epochs(self, source: Iterable[Any]) -> Iterator[Iterator[Any]]:
        """For each epoch, an iterator of its batches from the position on; opened when it is asked for."""
        sampler = getattr(source, "batch_sampler", None)
        if isinstance(source, StreamLoader):
            return self._epochs_of_stream(source)
        if isinstance(sampler, EpochSampler) and self.length is not None:
            return self._epochs_of_sampler(source, sampler)
        if isinstance(source, BatchLoader) and isinstance(sampler, CyclicSampler) and self.length is None:
            return self._epochs_of_cycle(source, sampler)
        return self._epochs_of_loader(self.loader)

    def _epochs_of_new_loaders(self, renew: Callable[[], Any]) -> Iterator[Iterator[Any]]:
        """Epochs of which each has a loader of its own; the first one of a run is there already."""
        is_first = self.done == 0
        while True:
            if not is_first:
                before, self.loader = self.loader, renew()
                self._fresh = not {*map(id, _generators(before))} & {*map(id, _generators(self.loader))}
            is_first = False
            yield from islice(self._epochs(source_of(self.loader)), 1)
            assert self._next_epoch is not None, "an epoch was opened"
            epoch, start = self._next_epoch
            if self.length is not None and self.done - start < self.length:
                self._refuse_end(self.done - start)
            self._next_epoch = epoch + 1, self.done

    def _epochs_of_sampler(self, loader: Any, sampler: EpochSampler) -> Iterator[Iterator[Any]]:
        epoch, skipped = self._place(len(sampler))
        while True:
            self._begin_epoch(epoch, skipped)
            sampler.set_batches_done(self.done)
            yield iter(loader)
            epoch, skipped = epoch + 1, 0

    def _place(self, length: int) -> tuple[int, int]:
        """The epoch to open, and the batches in it before the position; ``length``: that of an epoch, 0: unknown."""
        saved = self._continued
        if self._next_epoch is not None:
            epoch, start = self._next_epoch
            length = self._read_length
        elif saved is not None and (not length or saved.get("varies")):
            epoch, start, length = saved["epoch"], saved["done"], saved.get("length", 0)
        else:
            return divmod(self.done, length) if length else (0, self.done)
        skipped = self.done - start
        return (epoch + 1, 0) if length and skipped >= length else (epoch, skipped)

    def _epochs_of_cycle(self, loader: BatchLoader, sampler: CyclicSampler) -> Iterator[Iterator[Any]]:
        """Epochs of batches that run across their ends: a batch belongs to the epoch of its first sample."""
        batches: Iterator[Any] | None = None
        self._cycle = first, done = self._cycle or (sampler.consumed_samples, self.done)
        size = sampler.micro_batch_size * sampler.data_parallel_size  # of all ranks
        while True:
            start = first + (self.done - done) * size
            epoch, state = sampler.epoch_at(start), sampler.length_state
            loader.begin_epoch(epoch, restarts=False)
            if sampler.place_at(start) < size:  # the first batch of an epoch
                sampler.begin_epoch(start)
            has_changed = sampler.length_state != state
            if has_changed:
                loader.restart()
            if batches is None or has_changed or (loader.num_workers and self.may_change()):
                batches = None  # it holds the workers
                sampler.set_consumed_samples(start)
                self._begin_epoch(epoch)
                batches = iter(loader)
            self.begin_epoch()
            yield islice(batches, -(-(sampler.num_used - sampler.place_at(start)) // size))

    def _epochs_of_stream(self, loader: StreamLoader) -> Iterator[Iterator[Any]]:
        """The stream calls ``set_epoch`` itself for each of its passes."""
        batches: Iterator[Any] | None = None
        loader.infinite = True  # until ``close``
        while True:
            if batches is None or (loader.num_workers and self.may_change()):
                batches = None
                if self._stream is not None:  # workers, and an earlier training, may have read ahead
                    loader.load_state_dict(loader.state_dict(self._num_of_stream()))
                self._stream = loader.batches, self.done
                batches = iter(loader)
                if loader.batches == 0 and self.compare_reads is not None:
                    batches = chain(map(partial(_after, self.compare_reads, loader), islice(batches, 1)), batches)
            if self.length is None and self.measure is None:
                yield batches
                continue
            epoch, skipped = self._place(self.length or 0)
            self._open_length(epoch, skipped)
            assert self.length is not None, "measured"
            yield islice(batches, self.length - skipped)
            self._next_epoch = epoch + 1, self.done

    def _num_of_stream(self) -> int | None:
        """The stream's number of the latest batch given; None: all that it has read."""
        return None if self._stream is None else self._stream[0] + self.done - self._stream[1]

    def _epochs_of_loader(self, loader: Any) -> Iterator[Iterator[Any]]:
        """Epochs of a loader of the user's own: an iteration of it, or ``length`` batches of one."""
        log_if_workers_restart(loader)
        keeps, is_positioned = self._keeps_generators, self._is_positioned
        self._keeps_generators = self._is_positioned = False
        epoch, skipped, to_drop = self._place_in(loader, is_positioned=is_positioned)
        keeps = keeps and (is_positioned or skipped > 0)  # a later epoch draws from the generators as it is opened
        if not is_positioned:
            self._log_start(loader, epoch, to_drop)
        has_batches, source = True, source_of(loader)
        while True:
            before, had_batches = self.done, has_batches
            self._begin_epoch(epoch, skipped)
            length = self.length
            with kept_generators() if keeps else nullcontext():
                self._set_generators(source, is_inside=skipped > 0 and not is_positioned)
                batches = self._opened_at(loader, epoch, skipped, to_drop)
                dropped = sum(1 for _ in islice(batches, to_drop))
            if length is None:
                yield islice(batches, None)  # a generator of the user's has a close(), and others may go on with it
                has_batches = self.done > before or dropped > 0
                if not (has_batches or had_batches):  # one iteration has none behind the last batch of a pass
                    why = "its dataset is empty, or smaller than a batch and drop_last is True"
                    if self.done and isinstance(loader, Iterator):
                        why = "it can be read once. Give a DataLoader, or an object whose __iter__ begins a new pass"
                    raise ConfigError(f"The data loader {type(loader).__name__} gave no batch: {why}.")
            else:
                # A positioned loader may be behind the last batch of a pass.
                yield islice(chain(batches, _opened_later(loader)) if is_positioned else batches, length - skipped)
                if self.done - before < length - skipped:
                    self._refuse_end(dropped + self.done - before)
            skipped = to_drop = to_drop - dropped
            epoch, is_positioned, keeps = epoch + 1, False, keeps and skipped > 0

    def _refuse_end(self, given: int) -> None:
        raise ConfigError(
            f"Trainer.train_dataloader: {type(self.loader).__name__} gave {given} batches, but its length is"
            f" {self.length}. Its __len__ is asked at the start of each epoch, after set_epoch."
        )

    def _place_in(self, loader: Any, *, is_positioned: bool) -> tuple[int, int, int]:
        """The epoch, the batches before the position in it, and how many of them are read again."""
        saved, (epoch, skipped) = self._continued, self._place(self.length or _length(loader))
        to_drop = 0 if is_positioned else skipped
        if isinstance(loader, Repeated):
            if saved is not None and self.done - skipped <= saved["done"]:
                to_drop = self.done - saved["done"]  # the batches of the latest pass
            loader.start = skipped - to_drop
        return epoch, skipped, to_drop

    def _opened_at(self, loader: Any, epoch: int, skipped: int, to_drop: int) -> Iterator[Any]:
        """An iteration of the loader, before which the generators are recorded."""
        source = source_of(loader)
        record = partial(self._record_generators, source, epoch, self.done - skipped)
        if isinstance(loader, Repeated) and not getattr(source, "persistent_workers", False):
            loader.begin_pass = record
        else:
            record(skipped - to_drop)
        with workers_started(getattr(source, "dataset", None), getattr(source, "collate_fn", None)):
            return opened(self._with_fresh_workers(loader))

    def _set_generators(self, loader: Any, *, is_inside: bool) -> None:
        """Set the random generators to those that were saved; ``is_inside``: to those that opened the epoch."""
        saved, self._continued = self._continued, None
        if saved is not None:
            states = saved["opened"] if is_inside else [] if self._fresh else saved["now"]
            for one, state in zip(_generators(loader), states, strict=False):
                set_generator_state(one, state)
            if is_inside:
                set_random_state(saved["random"])

    def _record_generators(self, loader: Any, epoch: int, start: int, given: int) -> None:
        """Record the random generators before a pass of an epoch is opened, after ``given`` batches of the epoch.

        ``start``: the batches of the run before the epoch.
        """
        random = random_state()
        random = {name: random[name] for name in ("python", "numpy", "torch")}  # loaders draw on the host
        opened = [generator_state(one) for one in _generators(loader)]
        place = {"epoch": epoch, "done": start + given, "length": self._read_length, "varies": self._varies}
        self._opened = {**place, "random": random, "opened": opened}

    def _log_start(self, loader: Any, epoch: int, count: int) -> None:
        """Log that a resumed run reads ``count`` batches again, and a loader whose order may be another one."""
        source, kind, is_resumed = source_of(loader), type(loader).__name__, self._continued is not None
        log_shuffle_buffer(getattr(source, "dataset", None))
        sampler = getattr(source, "sampler", None)
        is_known = type(sampler).__module__.startswith("torch.utils.data") or hasattr(sampler, "set_epoch")
        is_known = type(source) is DataLoader and is_resumed and (is_known or len(_generators(source)) > 0)
        if (
            is_known
            and getattr(source, "persistent_workers", False)
            and self._with_fresh_workers(loader) is loader
            and epoch
        ):
            logger.warning(
                "The training loader %s keeps its workers (persistent_workers=True); a resumed run starts new ones:"
                " it is exact if the data set draws no random numbers.", kind,
            )  # fmt: skip
        if is_known and count:
            logger.info("The training loader %s: %d batches of this epoch are read again and dropped.", kind, count)
        elif not is_known and (count or (is_resumed and not isinstance(source, list | tuple))):
            logger.warning(
                "The training loader %s cannot be set to a position: %d batches are read again and dropped. The resumed"
                " run is exact if it gives the same batches again: without shuffling, or with the global random"
                " generators, or with one that is an attribute of the loader or its sampler.", kind, count,
            )  # fmt: skip

    def _begin_epoch(self, epoch: int, skipped: int = 0) -> None:
        """Call ``set_epoch``; our loaders end workers that do not know what has changed.

        ``skipped``: the batches of the epoch before the position.
        """
        loader = source_of(self.loader)
        batch_sampler, (setters, of_data) = getattr(loader, "batch_sampler", None), loader_epoch_setters(loader)
        if isinstance(loader, BatchLoader):
            loader.begin_epoch(epoch, restarts=self.may_change())
            of_data = []  # it calls them itself
        for set_epoch in [*setters, *of_data]:
            set_epoch(epoch)
        if isinstance(batch_sampler, EpochSampler) and self.length is not None and isinstance(loader, BatchLoader):
            before = len(batch_sampler)
            batch_sampler.begin_epoch(epoch, self.done - skipped)
            if len(batch_sampler) != before:
                loader.restart()
        self._open_length(epoch, skipped)

    def _open_length(self, epoch: int, skipped: int) -> None:
        """The length of an epoch that begins, which may be another than before."""
        self._epoch_start = self.done - skipped
        self._next_epoch = epoch, self._epoch_start
        self._counter.begin(self.loader)
        if self.measure is not None:
            self.length = self.measure(self.loader)
        length = self.length or _length(self.loader)
        self._varies |= self._read_length not in (0, length)
        self._read_length = length

    def _with_fresh_workers(self, loader: Any) -> Any:
        """``loader``; a copy of it, if it keeps workers that do not know what has changed.

        The object that is iterated keeps the workers: a copy starts new ones, and ends them when it is gone. A loader
        with a state of its own is not copied, since it tells the position.
        """
        source = source_of(loader)
        keeps = getattr(source, "persistent_workers", False) and not (
            isinstance(source, BatchLoader) or has_state(source)
        )
        if not keeps or not (self.may_change() or epoch_setters(getattr(source, "dataset", None))):
            return loader
        fresh = copy.copy(source)
        return loader.of(fresh) if isinstance(loader, Repeated) else fresh


class Repeated:
    """A loader of ``length`` batches that repeats a loader without a length as often as necessary."""

    is_open_ended = True  # a resumed run may have another length

    def __init__(self, loader: Iterable[Any], length: int) -> None:
        self.loader = loader
        self.start = 0  # batches before the first one of the next iteration
        self.begin_pass: Callable[[int], None] = lambda given: None  # called before each iteration of the loader
        self._length = length

    def of(self, loader: Iterable[Any]) -> "Repeated":
        """The next iteration, of another loader."""
        other = Repeated(loader, self._length)
        other.start, self.start, other.begin_pass = self.start, 0, self.begin_pass
        return other

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        given, self.start = self.start, 0
        self.begin_pass(given)
        return self._read(opened(self.loader), given)

    def _read(self, batches: Iterator[Any], given: int) -> Iterator[Any]:
        while given < self._length:
            before = given
            for batch in batches:
                yield batch
                given += 1
                if given == self._length:
                    return
            if given == before:
                raise ConfigError("Trainer.train_dataset: it yields no sample; it must yield at least one batch.")
            self.begin_pass(given)
            batches = opened(self.loader)


def _opened_later(loader: Iterable[Any]) -> Iterator[Any]:
    yield from opened(loader)


def _after(compare: Callable[[Any], object], loader: StreamLoader, batch: Any) -> Any:
    """The first batch, once the samples that all ranks have read are compared."""
    if loader.first_reads is not None:
        compare(loader.first_reads)
    return batch


def _compared(name: str, expected: Mapping[str, str], batch: Any) -> Any:
    if described(batch, VALUES) != expected:
        logger.warning(
            "%s: its state_dict() does not restore the next sample, so a resume reads other samples than the"
            " uninterrupted run. It must hold all that the next sample depends on, such as a shuffle buffer; without"
            " state_dict() the samples before are read again, which is exact (docs/data.md).",
            name,
        )
    return batch


def loader_epoch_setters(loader: Any) -> tuple[list[Callable[[int], Any]], list[Callable[[int], Any]]]:
    """The methods ``set_epoch`` of the samplers of a loader, and of its data set."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    samplers = getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)
    setters = [getattr(one, "set_epoch", None) for one in {id(one): one for one in samplers}.values()]
    return [*filter(None, setters)], epoch_setters(getattr(loader, "dataset", None))


def source_of(loader: Any) -> Any:
    """The loader that a :class:`Repeated` repeats, or the loader itself."""
    return loader.loader if isinstance(loader, Repeated) else loader


def _length(loader: Any) -> int:
    """The batches of an iteration; 0: unknown. A DataLoader of a stream has a ``__len__`` that raises."""
    try:
        return len(loader)
    except TypeError:
        return 0


def _generators(loader: Any) -> list[Any]:
    """The random generators that are attributes of a loader, its samplers and its data set."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    samplers = getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)
    parts = loader, *samplers, getattr(loader, "dataset", None)
    found = {id(one): one for part in parts for one in getattr(part, "__dict__", {}).values() if is_generator(one)}
    return [*found.values()]


def log_if_workers_restart(data_loader: Any) -> None:
    """Log a suggestion if a torch DataLoader restarts its workers in each epoch."""
    if getattr(data_loader, "num_workers", 0) and not getattr(data_loader, "persistent_workers", True):
        logger.info(
            "The given %s restarts its %d workers in each epoch; persistent_workers=True keeps them.",
            type(data_loader).__name__,
            data_loader.num_workers,
        )
