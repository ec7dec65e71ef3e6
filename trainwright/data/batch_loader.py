"""BatchLoader: torch's DataLoader whose batches are the same for any number of workers.

Workers are torch's. Without workers, batches are read directly: from the indices of the sampler to the reader.
"""

import functools
import logging
import multiprocessing
import multiprocessing.connection
import operator
import os
import pickle
import re
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from multiprocessing.reduction import ForkingPickler
from multiprocessing.util import Finalize
from types import FrameType
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler, Subset, get_worker_info

from trainwright.base.dist import get_data_parallel_rank
from trainwright.base.errors import ConfigError, ConfigTypeError, did_you_mean
from trainwright.base.signal_handlers import set_handler
from trainwright.base.terminal import shortened
from trainwright.data.collate import collate, collated
from trainwright.data.columns import batch_picker
from trainwright.data.errors import DataError
from trainwright.data.instance import pinned
from trainwright.data.sampler import CyclicSampler, EpochSampler, SampleIndices, SingleRoundSampler
from trainwright.data.seeding import (
    LOADER_STREAM,
    SAMPLE_STREAM,
    WORKER_STREAM,
    SavedGenerators,
    kept_generators,
    mixed_seed,
    read_state,
    seed_everything,
    seed_generators,
    stream_key,
)
from trainwright.data.wrapped import inner_datasets, own_collator

_ENDING_S = 2.0  # in which a worker that sends nothing any more has ended
_SHOWN = 64  # indices that a message names at most


class BatchReader:
    """Reads batches, in the process that trains or in a worker, with the same result.

    What a sample draws from the global generators of ``random``, ``numpy.random`` and torch (on the CPU) is a function
    of (seed, epoch, index); what ``collate_fn`` draws, of (seed, epoch, position of the batch), and so is what a data
    set draws that is read by whole batches, with ``__getitems__``. Reading leaves the three generators as they were.

    A data set with ``set_epoch`` gets the epoch of each sample; one that is read by whole batches, that of the first.

    Errors get a note of the sample, or the batch, that they come from.
    """

    def __init__(self, dataset: Any, collate_fn: Callable[[list[Any]], Any], *, seed: int) -> None:
        self.dataset = dataset
        self.collate_fn = collate_fn
        self._key = stream_key(seed, SAMPLE_STREAM)
        self.epoch: int | None = None  # what set_epoch of the data set was called with
        self._epoch_setters = epoch_setters(dataset)
        self._length = 0  # of the data set after set_epoch; 0: not asked
        # None: samples are read, or what __getitems__ gives
        self.pick = None if self._epoch_setters else batch_picker(dataset, collate_fn)
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
            samples = []
            for number, index in enumerate(left):
                if self._epoch_setters:
                    self._set_epoch_of(indices, number, index)
                samples.append(dataset[index])
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
        self._set_epoch_of(indices, number, indices[number])
        self._seed(f"{indices.epoch_of(number)}:{_plain(indices[number])}")
        try:
            sample = self.dataset[indices[number]]
        except Exception as error:
            self._add_sample_note(error, indices, number)
            raise
        self._record_draws()
        return sample

    def _set_epoch_of(self, indices: SampleIndices, number: int, index: int) -> None:
        """Pass the epoch of the sample at place ``number`` to the data set, of which ``index`` is read.

        The batch at the end of an epoch takes its last samples from the next one, by the length of before: those that
        the data set does not have there are read in the epoch that ends.
        """
        self.set_epoch(epoch := indices.epoch_of(number))
        if self._epoch_setters and indices.epoch_length and epoch and self._is_missing(index):
            self.set_epoch(epoch - 1)

    def _is_missing(self, index: int) -> bool:
        if index >= self._length:  # not for each sample: a length may be expensive
            self._length = len(self.dataset)
        return index >= self._length

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch to the data set. What it draws there is the same in each worker."""
        if epoch != self.epoch and self._epoch_setters:
            self.epoch, self._length = epoch, 0
            with kept_generators():
                seed_generators(self._key, f"epoch:{epoch}")
                for set_epoch in self._epoch_setters:
                    set_epoch(epoch)

    def _seed(self, place: str) -> None:
        seed_generators(self._key, place)
        if self._draws is None:
            self._seeded = read_state()

    def _record_draws(self) -> None:
        if self._draws is None and self._seeded is not None and read_state() != self._seeded:
            self._draws = True

    def _fetched(self, indices: SampleIndices) -> Any:
        if self._epoch_setters:
            self._set_epoch_of(indices, 0, max(indices) if indices.epoch_length else 0)
        try:
            samples = self.dataset.__getitems__(indices)
        except Exception as error:
            _add_note(error, f"reading {self.shown(indices)}")
            raise
        if self.collate_fn is collate and isinstance(samples, Mapping | Tensor):
            raise DataError(
                f"data: {type(self.dataset).__name__}.__getitems__ gave a {type(samples).__name__}; it must give a list"
                " of samples, or the whole batch with data_collator=lambda batch: batch (collate_fn= of a loader)."
            )
        return samples

    def _collated(self, indices: SampleIndices, samples: Any) -> Any:
        try:
            return collated(self.collate_fn, samples)
        except Exception as error:
            is_list = isinstance(samples, list) and len(samples) == len(indices)
            if is_list and (place := next((n for n, sample in enumerate(samples) if sample is None), None)) is not None:
                raise DataError(
                    f"data: sample {_plain(indices[place])} of {type(self.dataset).__name__} is None: does its"
                    " __getitem__ return a value in every case?"
                ) from error
            _add_note(error, f"making a batch of {self.shown(indices)}")
            raise

    def _add_sample_note(self, error: Exception, indices: SampleIndices, number: int) -> None:
        what = f"sample {_plain(indices[number])} of {type(self.dataset).__name__}"
        _add_note(error, f"reading {what} (epoch {indices.epoch_of(number)})")
        if isinstance(error, IndexError) and isinstance(self.dataset, Sized):
            kind, length = type(self.dataset).__name__, len(self.dataset)
            error.add_note(f"{kind}.__len__ returns {length}: if there are fewer samples, correct it.")

    def shown(self, indices: SampleIndices) -> str:
        """The samples of a batch, for a message."""
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


def epoch_setters(dataset: Any) -> list[Callable[[int], Any]]:
    """The methods ``set_epoch`` of a data set: its own, or those of the data sets that it consists of."""
    own = getattr(dataset, "set_epoch", None)
    if callable(own):
        return [own]
    return [setter for part in inner_datasets(dataset) for setter in epoch_setters(part)]


def _reads_batches(dataset: Any) -> bool:
    """Whether the data set has a ``__getitems__`` of its own. That of torch's Subset calls the one of its data set."""
    while isinstance(dataset, Subset) and type(dataset).__getitems__ is Subset.__getitems__:
        dataset = dataset.dataset
    return callable(getattr(dataset, "__getitems__", None))


logger = logging.getLogger("trainwright.data")

# Arguments of the builders of loaders, and those that are set elsewhere.
_OF_BUILDERS = ("train_batch_size", "test_batch_size", "num_workers", "collate_fn", "seed")
_SIZE = (
    "The size is train_batch_size, of a loader for evaluations test_batch_size; in a config file set it as"
    " train.train_micro_batch_size and train.test_micro_batch_size."
)
_OF_SAMPLER = "The sampler decides it: sampler=LazyCall({sampler})({name}=...)."
_SET_ELSEWHERE = {
    **dict.fromkeys(("batch_size", "micro_batch_size", "global_batch_size", "train_micro_batch_size"), _SIZE),
    "shuffle": _OF_SAMPLER.format(sampler="CyclicSampler", name="shuffle"),
    "drop_last": _OF_SAMPLER.format(sampler="SingleRoundSampler", name="drop_last"),
    "batch_sampler": "It is sampler: a class of samplers, or a lazy call of one.",
    "generator": "The seed of the run decides: train.seed.",
}
# Arguments that are passed on to torch's DataLoader. The others are those of the sampler, or are set here.
_LOADER_OPTIONS = (
    "pin_memory",
    "prefetch_factor",
    "timeout",
    "multiprocessing_context",
    "worker_init_fn",
    "in_order",
    "persistent_workers",
)
_SWITCHES = ("pin_memory", "in_order", "persistent_workers")


class BatchLoader(DataLoader[Any]):
    """torch's DataLoader over batches of indices, with the ``mixup_func`` for its batches.

    It reads with a `BatchReader`: batches, also random ones, are the same for any ``num_workers``, and iteration draws
    no numbers from the global generators.
    """

    def __init__(
        self,
        dataset: Any,
        batch_sampler: Any,
        *,
        seed: int = 0,
        mixup_func: Callable[..., Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(dataset, batch_sampler=batch_sampler, **options)
        self.mixup_func = mixup_func
        self.seed = seed
        self._options = options
        self._rounds = Rounds(batch_sampler)
        # Created at the first iteration: collate_fn may be set until then.
        self._reader: BatchReader | None = None
        self._with_workers: DataLoader[Any] | None = None

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch declares a private class
        reader = self._reader_here()
        self._rounds.round += 1
        if self.num_workers == 0:
            return self._in_this_process(reader)
        if self._with_workers is None:
            options = {**self._options, "collate_fn": unchanged}
            indexed: Any = _WorkerReader(reader)
            self._with_workers = DataLoader(indexed, batch_sampler=self._rounds, **options)
        return WorkerBatches(self._with_workers)

    def _reader_here(self) -> BatchReader:
        if self._reader is None:
            self._reader = BatchReader(self.dataset, self.collate_fn, seed=self.seed)
        return self._reader

    def _in_this_process(self, reader: BatchReader) -> "_LocalBatches":
        read: Callable[[Any], Any] = reader.__getitems__
        gives_indices = type(self.batch_sampler) in (CyclicSampler, EpochSampler, SingleRoundSampler)
        sampler: Any = self.batch_sampler if gives_indices else self._rounds
        indices: Iterator[Any] = iter(sampler)
        # Slices of the order of the epoch: no other code needs lists.
        takes_tensors = gives_indices and not getattr(sampler.dataset, "supports_prefetch", False)
        if reader.pick is not None and takes_tensors:
            read, indices = reader.pick, sampler.index_tensors()
        pins = self.pin_memory and can_pin_memory()
        batches = _LocalBatches((lambda one: pinned(read(one))) if pins else read, indices)
        batches.loader = self
        return batches

    def read_again(self, first: int, number: int = 0) -> Any:
        """One of the `micro_batches` of all processes from ``first`` on, by its number from 0, read in this process."""
        reader, sampler = self._reader_here(), cast("Any", self.batch_sampler)
        epoch = reader.epoch
        try:
            return reader.__getitems__(sampler.indices_at(first, number))
        finally:
            if epoch is not None:
                reader.set_epoch(epoch)  # the data set may have another length in another one

    def begin_epoch(self, epoch: int, *, restarts: bool) -> None:
        """The next iteration is an epoch; the data set gets its number, since its length may depend on it.

        ``restarts``: with new workers, which know what has changed in the data.
        """
        self._rounds.round = epoch - 1
        if restarts and self.num_workers:
            self.close()
        self._reader_here().set_epoch(epoch)

    def restart(self) -> None:
        """Read the data as they are now: with new workers, in the epoch that has begun."""
        epoch = self._reader_here().epoch
        self.close()
        self._reader_here().epoch = epoch

    def close(self) -> None:
        """End the workers, if there are any; the next iteration starts new ones.

        Without it, each worker of a garbage-collected loader takes 5 s to end: its queues are closed first.
        """
        self._reader = self._with_workers = None

    def __repr__(self) -> str:
        return (
            f"BatchLoader(<{type(self.dataset).__name__} of {len(self.dataset)}>, "  # type: ignore[arg-type]  # torch's Dataset has no len
            f"batch_sampler={self.batch_sampler!r}, num_workers={self.num_workers})"
        )


class _WorkerReader:
    """A `BatchReader` in a worker, whose batches and errors are sent to the process that trains."""

    def __init__(self, reader: BatchReader) -> None:
        self._reader, self.dataset, self.collate_fn = reader, reader.dataset, reader.collate_fn

    def __len__(self) -> int:
        return len(self._reader)

    def __getitems__(self, indices: SampleIndices) -> Any:
        with raisable_again():
            batch = self._reader.__getitems__(indices)
        _read.append((id(batch), functools.partial(self._reader.shown, indices)))
        return batch


# Of this worker: the last batches, by their identity, and functions that return what they are of. Torch sends a batch
# before it requests many more.
_read: deque[tuple[int, Callable[[], str]]] = deque(maxlen=16)


@dataclass(frozen=True, slots=True)
class _Unsent:
    """Sent in place of what a worker could not send."""

    text: str


def _received(batch: Any) -> Any:
    """A batch of a worker; raises the error of one that it could not send."""
    if type(batch) is _Unsent:
        raise DataError(batch.text)
    return batch


def _report_unsent() -> None:
    """Called in a worker: what it cannot send is an error in the process that trains."""
    if hasattr(Queue, "_on_queue_feeder_error"):  # for subclasses, but torch makes the queue of this process
        Queue._on_queue_feeder_error = _send_unsent


def _send_unsent(queue: Any, error: Exception, unsent: Any) -> None:
    """Called in a worker when pickling has failed: without an answer, the training would wait forever."""
    number, content = unsent
    batch = next((shown() for identity, shown in _read if identity == id(content)), None) or _place(number)
    caught = getattr(content, "exc_msg", None)  # torch sends an error as its class, which may be local, and this text
    if isinstance(caught, str):
        text = f"reading {batch} has failed with an error whose class no worker can send ({error}):\n{caught}"
    else:
        name, part = _not_sendable(content, "batch") or ("batch", content)
        text = f"{name} of {batch} is a {type(part).__name__}, which no worker can send ({error})."
    answer = number, _Unsent(f"data: {text}")
    if hasattr(queue, "_buffer") and hasattr(queue, "_sem"):
        # In the place of what could not be sent: put() would send it behind the end of a stream, which ends the pass.
        queue._sem.acquire()
        queue._buffer.appendleft(answer)
    else:
        queue.put(answer)


def _place(number: int) -> str:
    """The batch of this number in a pass of a loader that is not ours."""
    info = get_worker_info()
    of = "" if info is None else f" of {type(info.dataset).__name__}, read by worker {info.id}"
    if _consecutive is None or (
        info is not None and info.num_workers > 1 and isinstance(info.dataset, IterableDataset)
    ):
        return f"batch {number + 1}{of}"
    first = number * _consecutive
    return f"batch {number + 1} (the samples {first} to {first + _consecutive - 1}){of}"


_consecutive: int | None = None  # in a worker: the size of the batches, if a batch has consecutive samples


@contextmanager
def raisable_again() -> Iterator[None]:
    """An error of a worker gets a class of which torch can make an error in the process that trains."""
    try:
        yield
    except Exception as error:
        kind: Any = type(error)
        try:
            ForkingPickler.dumps(kind)  # not a local class
            if getattr(kind, "message", None):
                kind(message="")  # as torch calls it then
        except Exception:
            raise DataError(f"data: {kind.__name__}: {shortened(str(error))}") from error
        raise


class Rounds:
    """A batch sampler whose plain lists become `SampleIndices` with the number of the round as their epoch.

    `SampleIndices` stay as they are.
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
                if not isinstance(indices, Iterable) or getattr(indices, "ndim", 1) == 0:
                    raise ConfigTypeError(
                        f"{type(self.batch_sampler).__name__} yields single indices; the loader takes a sampler that"
                        " yields lists of them: torch.utils.data.BatchSampler(sampler, batch_size, drop_last=True)."
                    )
                placed = SampleIndices(indices, epoch=epoch, position=position, epoch_length=None)
                position += len(placed)
            yield placed


class _LocalBatches(map):  # type: ignore[type-arg]  # the type of its items depends on the function
    """The batches that this process reads: a ``map`` of the reader over indices, with a length."""

    loader: BatchLoader

    def __len__(self) -> int:
        return len(self.loader)


class WorkerBatches(Iterator[Any]):
    """The batches that the workers of a loader read. They are started here, and end with this process.

    Torch raises the error of a worker from a frame that holds it. This cycle would keep torch's iterator until garbage
    collection, which closes the queues of the workers first: waiting for them to end then takes 5 s each.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        reader: Any = loader.dataset
        with _ended_with_this_process(), workers_started(reader.dataset, reader.collate_fn):
            self._batches: Any = iter(loader)

    def __next__(self) -> Any:
        try:
            batch = next(self._batches)
        except Exception as error:
            error = error.with_traceback(None)  # the worker's traceback is in its message
            if not isinstance(error, RuntimeError | OSError | EOFError) or str(error).startswith("Caught"):
                raise error
            codes = _workers.exit_codes(wait=isinstance(error, OSError | EOFError))
            if not codes:
                raise error
            raise DataError(
                f"data: a worker of the loader ended (exit code {', '.join(map(str, codes))}; -9 is often a lack of"
                " memory). With num_workers=0 the samples are read in this process, which shows their errors."
            ) from error
        return _received(batch)

    def __len__(self) -> int:
        return len(self._batches)


def opened(loader: Any) -> Iterator[Any]:
    """``iter(loader)``; of a loader of torch that is not ours, the workers also report what they cannot send."""
    source = getattr(loader, "base_dataloader", loader)  # a loader of accelerate reads with another one
    if isinstance(source, DataLoader) and not isinstance(source, BatchLoader) and source.num_workers > 0:
        return _UserBatches(loader, source)
    return iter(loader)


class _UserBatches(Iterator[Any]):
    """The batches of a loader of the user's own. ``source`` is the loader that starts the workers."""

    def __init__(self, loader: Iterable[Any], source: DataLoader[Any]) -> None:
        self._unstarted: DataLoader[Any] | None = source
        with _workers_report(source):
            self._batches = iter(loader)

    def __next__(self) -> Any:
        if (source := self._unstarted) is None:
            return _received(next(self._batches))
        self._unstarted = None
        with _workers_report(source):  # a generator starts them here
            return _received(next(self._batches))


@contextmanager
def _workers_report(loader: DataLoader[Any]) -> Iterator[None]:
    """Workers that a loader starts in this context report what they cannot send."""
    user_init = loader.worker_init_fn
    is_in_order = isinstance(loader.sampler, SequentialSampler) or isinstance(loader.dataset, IterableDataset)
    consecutive = loader.batch_size if is_in_order else None
    loader.worker_init_fn = functools.partial(_init_user_worker, user_init=user_init, consecutive=consecutive)
    try:
        yield
    finally:
        loader.worker_init_fn = user_init


def _init_user_worker(worker_id: int, *, user_init: Callable[[int], Any] | None, consecutive: int | None) -> None:
    global _consecutive
    _consecutive = consecutive
    # One that is not forked has not inherited the trainer's handlers. SIGTERM is left to torch: multiprocessing ends
    # workers with it at the exit of a program; those of our loaders have ended before.
    _ignore_signals("SIGUSR1")
    _report_unsent()
    if user_init is not None:
        user_init(worker_id)


@contextmanager
def workers_started(dataset: Any, collate_fn: Any) -> Iterator[None]:
    """In this context workers are started: an error names the part that cannot be sent to them."""
    try:
        yield
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        sent = {type(dataset).__name__: dataset, "data_collator": collate_fn}
        found = next(filter(None, (_not_sendable(one, name) for name, one in sent.items())), None)
        if found is None or not re.search("pickle|local object", str(error)):
            raise
        name, part = found
        raise ConfigTypeError(
            f"{name}: workers cannot receive {part!r} ({error}). Use a function or class of a module, not a lambda, a"
            " local function or an open file; or set num_workers=0."
        ) from error


def _not_sendable(value: Any, name: str) -> tuple[str, Any] | None:
    """The innermost part of a value that cannot be pickled, with its path."""
    try:
        ForkingPickler.dumps(value)
        return None
    except Exception:  # pickling calls code of the value's class
        parts = [(f"{name}.{key}", part) for key, part in getattr(value, "__dict__", {}).items()]
        if isinstance(value, Mapping):
            parts += [(f"{name}[{key!r}]", part) for key, part in value.items()]
        elif isinstance(value, list | tuple):
            parts += [(f"{name}[{index}]", part) for index, part in enumerate(value)]
        return next(filter(None, (_not_sendable(part, path) for path, part in parts)), (name, value))


def unchanged(batch: Any) -> Any:
    return batch


def make_loader(
    dataset: Any,
    batch_sampler: Any,
    *,
    seed: int,
    num_workers: int,
    collate_fn: Callable[[list[Any]], Any] | None,
    loader_options: Mapping[str, Any],
    mixup_func: Callable[..., Any] | None = None,
) -> BatchLoader:
    """A loader over ``batch_sampler``'s lists of indices. ``loader_options`` are arguments of torch's DataLoader."""
    num_workers = allowed_workers(num_workers)
    return BatchLoader(
        dataset,
        batch_sampler,
        seed=seed,
        mixup_func=mixup_func,
        num_workers=num_workers,
        collate_fn=collate_fn or own_collator(dataset) or collate,
        **loader_settings(seed, num_workers, get_data_parallel_rank(), loader_options),
    )


def loader_settings(seed: int, num_workers: int, rank: int, loader_options: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of torch's DataLoader: the user's, and those for its workers and generators."""
    for name in loader_options:
        if name not in _LOADER_OPTIONS:
            hint = _SET_ELSEWHERE.get(name) or did_you_mean(name, (*_LOADER_OPTIONS, *_OF_BUILDERS))
            raise ConfigTypeError(f"data loader: {name!r} is not one of its arguments. {hint}")
    for name in _SWITCHES:
        if not isinstance(value := loader_options.get(name, True), bool):
            raise ConfigTypeError(
                f"data loader: {name}: got {value!r} ({type(value).__name__}); it must be True or False."
            )
    user_init = loader_options.get("worker_init_fn")
    options: dict[str, Any] = {"pin_memory": can_pin_memory(), "persistent_workers": num_workers > 0, **loader_options}
    options["worker_init_fn"] = functools.partial(init_worker, seed=seed, rank=rank, user_init=user_init)
    options["generator"] = torch.Generator("cpu").manual_seed(mixed_seed(seed, LOADER_STREAM, rank))
    if num_workers == 0:  # torch rejects these without workers; a config must work with and without
        for name in ("prefetch_factor", "timeout", "multiprocessing_context", "persistent_workers"):
            options.pop(name, None)
    return options


def allowed_workers(num_workers: int) -> int:
    """``num_workers``, or the number of CPUs if these are fewer."""
    if isinstance(num_workers, bool) or not isinstance(num_workers, int) or num_workers < 0:
        raise ConfigError(f"num_workers: got {num_workers!r}; it must be a whole number >= 0.")
    available = os.cpu_count() or 1
    if num_workers > available:
        logger.debug("num_workers=%d: this machine has %d CPUs, so %d are used.", num_workers, available, available)
    return min(num_workers, available)


def can_pin_memory() -> bool:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator is not None and accelerator.type != "mps"  # torch does not pin for mps


def init_worker(worker_id: int, *, seed: int, rank: int, user_init: Callable[[int], Any] | None) -> None:
    """Initialize a worker of a loader. ``user_init(worker_id)`` is called last."""
    _ignore_signals("SIGTERM", "SIGUSR1")
    _report_unsent()
    seed_everything(mixed_seed(seed, WORKER_STREAM, rank, worker_id))
    info = get_worker_info()
    if info is not None and isinstance(info.dataset, _WorkerReader):
        # The user's functions expect their data set here, not the reader. The class is frozen.
        object.__setattr__(info, "dataset", info.dataset.dataset)
    if user_init is not None:
        user_init(worker_id)
    _end_without_trainer()


def _end_without_trainer() -> None:
    """End if the training process was killed while this worker started.

    From here on torch's worker ends when its parent changes. One whose parent has already changed would wait forever.
    """
    parent = multiprocessing.parent_process()
    kind = type(multiprocessing.current_process()).__name__  # "Process": of the start method that is set
    method = multiprocessing.get_start_method() if kind == "Process" else kind
    is_direct = not method.lower().startswith("forkserver")
    if parent is not None and is_direct and os.getppid() != parent.pid:
        os._exit(1)


def _ignore_signals(*names: str) -> None:
    """Ignore SIGINT and the signals with these names in a worker: the training process decides when to stop.

    A terminal sends Ctrl-C, and a scheduler SIGTERM, to all processes. The training process continues to the end of
    its step or evaluation, saves, and needs its workers until then. Torch's workers end when that process ends.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in names:
        if hasattr(signal, name):  # not SIG_IGN, which programs started by a data set would inherit
            set_handler(getattr(signal, name), _ignore)


def _ignore(signum: int, frame: FrameType | None) -> None: ...


class _Workers:
    """The workers that this process has started. They are killed at its exit.

    Without that, Python would send them SIGTERM, which they ignore, and wait for them.
    """

    def __init__(self) -> None:
        self._alive: set[BaseProcess] = set()
        self._at_exit: Finalize | None = None

    def add(self, workers: set[BaseProcess]) -> None:
        if self._at_exit is None or not self._at_exit.still_active():  # a forked process starts without finalizers
            self._alive = set()
            self._at_exit = Finalize(None, self._kill, exitpriority=0)
        self._alive = {worker for worker in self._alive if worker.is_alive()} | workers

    def exit_codes(self, *, wait: bool = False) -> list[int]:
        """Those of workers that were killed or failed. ``wait``: one may be ending, and sends no tensors any more."""
        if wait:
            try:
                multiprocessing.connection.wait([worker.sentinel for worker in self._alive], timeout=_ENDING_S)
            except RuntimeError as error:  # of torch's handler of the signal that a worker has ended
                logger.debug("%s", error)
        return sorted({worker.exitcode for worker in self._alive if worker.exitcode})

    def _kill(self) -> None:
        if not self._alive:
            return
        if hasattr(signal, "SIGCHLD"):
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would raise that a worker was killed
        for worker in self._alive:
            worker.kill()


_workers = _Workers()


@contextmanager
def _ended_with_this_process() -> Iterator[None]:
    """Worker processes that are started inside end with this process, at the latest."""
    before = set(multiprocessing.active_children())
    yield
    started = set(multiprocessing.active_children()) - before
    for worker in started:
        # Torch calls it for a worker that has not ended within 5 s; SIGTERM would be ignored.
        worker.terminate = worker.kill  # type: ignore[method-assign]
    _workers.add(started)
