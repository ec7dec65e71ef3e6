"""Streams: data that can only be iterated. Their loader gives each batch with the position after it.

A stream is any object with ``__iter__`` whose iteration restarts it. It may also have

* ``state_dict()`` and ``load_state_dict(state)``: its position. Without them, a resume reads the samples of the pass
  again and drops them, as it does for a stream of `datasets` with a shuffle buffer, which its state does not hold;
* ``set_epoch(number)``: called before each pass over it;
* ``shard(num_shards, index)``: a part of it, for a rank. Its ``__iter__`` then yields the share of each worker;
* ``is_sharded = True``: its ``__iter__`` yields the share of the rank and worker that calls it;
* ``identity()``: a dict of what must be equal on all ranks before it is sharded, such as a list of files by name.

A stream without the last two is read completely by each rank, in one worker at most, and each rank keeps its samples.
"""

import copy
import hashlib
import logging
import random
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from trainwright.base.dist import get_data_parallel_rank, get_data_parallel_size
from trainwright.base.errors import ConfigError, ConfigTypeError
from trainwright.data.batch_loader import WorkerBatches, allowed_workers, loader_settings, raisable_again, unchanged
from trainwright.data.collate import collate, collated
from trainwright.data.errors import DataError
from trainwright.data.same_samples import FirstReads
from trainwright.data.seeding import (
    ORDER_STREAM,
    SAMPLE_STREAM,
    SavedGenerators,
    generator_state,
    is_generator,
    kept_generators,
    mixed_seed,
    seed_generators,
    stream_key,
)
from trainwright.data.wrapped import own_collator

logger = logging.getLogger("trainwright.data")

Position = dict[str, Any]
_START: Position = {"batches": 0, "epoch": 0, "samples": 0, "offset": 0, "state": None}
_NO_BATCH = "no batch"  # with the position after a pass
_FIRST_READS = "first reads"  # with the values of the first samples of all ranks, before the first batch
_KEPT = 8  # positions behind the latest batch that can still be saved: a trainer reads at most 2 ahead


def is_stream(dataset: Any) -> bool:
    """Whether a data set can only be iterated from its beginning."""
    return isinstance(dataset, IterableDataset) or (
        hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__")
    )


def has_state(part: Any) -> bool:
    """Whether a stream or loader can save its position, so that it continues exactly there."""
    if not getattr(part, "use_stateful_dataloader", True):  # the methods of an accelerate loader need that
        return False
    if not isinstance(part, StreamLoader) and has_shuffle_buffer(getattr(part, "dataset", part)):
        return False
    return all(callable(getattr(part, name, None)) for name in ("state_dict", "load_state_dict"))


def has_shuffle_buffer(stream: Any) -> bool:
    """Whether a stream of `datasets` shuffles in a buffer: by its documentation, the samples in it are not part of its
    ``state_dict()``, and are lost when it is loaded."""
    return any(type(step).__name__.startswith("BufferShuffled") for step in _steps_of(stream))


def _steps_of(stream: Any) -> list[Any]:
    """The steps of a stream of `datasets`, which no public method gives."""
    if type(stream).__module__.partition(".")[0] != "datasets":
        return []
    steps = [getattr(stream, "_ex_iterable", None)]
    for step in steps:  # it grows
        steps += [getattr(step, "ex_iterable", None), *getattr(step, "ex_iterables", ())] if step is not None else []
    return [step for step in steps if step is not None]


def order_of_stream(stream: Any) -> dict[str, Any]:
    """What must be equal on all ranks in a stream that is sharded between them, by name; empty: not known."""
    if getattr(stream, "is_sharded", False):
        return {}
    if callable(getattr(stream, "identity", None)):
        return {str(name): value for name, value in stream.identity().items()}
    generators = [getattr(step, "generator", None) for step in _steps_of(stream)]
    if getattr(stream, "_distributed", None) is not None:  # sharded by the user
        return {}
    states = [_short(generator_state(one)) for one in generators if is_generator(one)]
    return {"the state of its shuffle's generator (unseeded?)": states} if states else {}


def _short(value: Any) -> str:
    return hashlib.blake2b(repr(value).encode(), digest_size=4).hexdigest()


def log_shuffle_buffer(stream: Any) -> None:
    """Log at the start what a resume will cost."""
    if has_shuffle_buffer(stream):
        logger.info(
            "%s shuffles in a buffer of its own, which is not part of its state_dict: a resume is exact, but reads the"
            " samples of the pass again and drops them. The trainer's shuffle_buffer resumes at its position.",
            type(stream).__name__,
        )


def is_shared(stream: Any) -> bool:
    """Whether the ``__iter__`` of a stream yields only the share of the worker that calls it."""
    default = getattr(stream, "is_sharded", False) or hasattr(stream, "shard")
    return bool(getattr(stream, "is_shared_by_workers", default))  # a mixture knows it


def shard_of_rank(stream: Any, rank: int, world_size: int) -> Any:
    """The samples of a stream that belong to a rank; no sample belongs to two."""
    if world_size == 1 or getattr(stream, "is_sharded", False):
        return stream
    if type(stream).__module__.partition(".")[0] == "datasets":
        from datasets.distributed import split_dataset_by_node

        return split_dataset_by_node(stream, rank, world_size)
    if hasattr(stream, "shard"):
        return stream.shard(num_shards=world_size, index=rank)
    logger.info(
        "%s has no method 'shard': each of the %d ranks reads all of its samples and keeps every %d-th. If its __iter__"
        " yields only a rank's share, set is_sharded = True on it.", type(stream).__name__, world_size, world_size,
    )  # fmt: skip
    return (_EveryNthWithState if has_state(stream) else _EveryNth)(stream, rank, world_size)


def _has_shared_epoch(stream: Any) -> bool:
    """Whether workers would share the number of the pass: that of `datasets` is in shared memory."""
    parts = getattr(stream, "datasets", [stream])  # of a mixture
    return any(type(part).__module__.partition(".")[0] == "datasets" for part in parts)


def opened(stream: Any, epoch: int, done: int, state: Any) -> Iterator[Any]:
    """The samples of a pass over a stream after the first ``done``: in its ``state``, or those are read and dropped."""
    if hasattr(stream, "set_epoch"):
        stream.set_epoch(epoch)
    if state is not None:
        stream.load_state_dict(state)
        done = 0
    iterator: Iterator[Any] = iter(stream)
    read = sum(1 for _ in islice(iterator, done))
    if read < done:
        raise DataError(
            f"{type(stream).__name__}: pass {epoch} has {read} samples, but {done} were read before the checkpoint was"
            " saved. It must yield the same samples again."
        )
    return iterator


class _EveryNth:
    """Every ``step``-th sample of a stream, from ``first`` on."""

    def __init__(self, stream: Any, first: int, step: int) -> None:
        self.stream, self.step, self._first = stream, step, first
        self._before = first  # samples before the next one of this rank
        self.first_reads = FirstReads()

    def __iter__(self) -> Iterator[Any]:
        before, self._before = self._before, self._first
        for sample in self.first_reads.of(self.stream):
            if before:
                before -= 1
            else:
                before = self.step - 1
                yield sample

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.stream, "set_epoch"):
            self.stream.set_epoch(epoch)


class _EveryNthWithState(_EveryNth):
    def state_dict(self) -> Any:
        return self.stream.state_dict()  # right after a sample of this rank

    def load_state_dict(self, state: Any) -> None:
        self.stream.load_state_dict(state)
        self._before = self.step - 1


class _Passes:
    """The samples of a stream from a position on, one pass after another; knows the position after the latest one."""

    def __init__(self, stream: Any, position: Position, *, block_size: int | None, seed: int, key: bytes) -> None:
        self._stream, self._block_size, self._seed, self._key = stream, block_size, seed, key
        self._epoch, self._done, self._offset = position["epoch"], position["samples"], position["offset"]
        self._has_state = has_state(stream)
        # Of the stream, at the beginning of the block.
        self._state = position["state"] if self._has_state else None
        self._left: Iterator[Any] | None = None  # opened, if it is to be read
        self.samples = self._samples()

    @property
    def is_empty(self) -> bool:
        """Whether this pass has had no sample yet."""
        return self.count == 0

    @property
    def count(self) -> int:
        """The samples of this pass so far."""
        return int(self._done + self._offset)

    def next_pass(self) -> None:
        self._epoch, self._done, self._offset, self._state = self._epoch + 1, 0, 0, None
        self._left = None
        self.samples = self._samples()

    def position(self) -> Position:
        is_new = self.is_empty
        state = None if is_new else self._state if self._block_size else self._current_state()
        return {"epoch": self._epoch, "samples": self._done, "offset": self._offset, "state": state}

    def _samples(self) -> Iterator[Any]:
        """The rest of the samples of this pass, in blocks that are shuffled, if they are to be shuffled."""
        left = self.open()
        if self._block_size is None:
            for sample in left:
                self._done += 1
                yield sample
            return
        while True:
            if self._done:
                self._state = self._current_state()
            seed_generators(self._key, f"block:{self._epoch}:{self._done}")
            block = list(islice(left, self._block_size))
            if not block:
                return
            order = list(range(len(block)))
            random.Random(mixed_seed(self._seed, ORDER_STREAM, self._epoch, self._done)).shuffle(order)
            for number in order[self._offset :]:
                self._offset += 1
                yield block[number]
            self._done, self._offset = self._done + len(block), 0

    def open(self) -> Iterator[Any]:
        """Start the iteration of this pass at the position."""
        if self._left is None:
            self._left = opened(self._stream, self._epoch, self._done, self._state)
        return self._left

    def _current_state(self) -> Any:
        # A copy: it may be the object that the stream changes while it is read.
        return copy.deepcopy(self._stream.state_dict()) if self._has_state else None


class _StreamReader(IterableDataset[Any]):
    """Reads the batches of a worker, or of this process; gives each with the worker's number and the position after it.

    What is drawn from the global generators while a batch is read is a function of seed, rank, worker and batch. The
    generators of the process do not change.
    """

    def __init__(self, stream: Any, batch_size: int, collate_fn: Callable[[list[Any]], Any], **settings: Any) -> None:
        self.dataset, self.batch_size, self.collate_fn = stream, batch_size, collate_fn
        self.drop_last: bool | None = settings["drop_last"]
        self.shuffle_buffer, self.seed, self.rank = settings["shuffle_buffer"], settings["seed"], settings["rank"]
        self.infinite = True
        self.last_worker = -1  # the worker of the batch before the first one; -1: none
        self.starts: dict[int, Position] = {}  # by worker

    def __iter__(self) -> Iterator[Any]:
        with raisable_again():
            yield from self._batches()

    def _batches(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, num_workers = (0, 1) if info is None else (info.id, info.num_workers)
        if worker <= self.last_worker < num_workers - 1:
            yield None  # torch starts with worker 0, which is not the next one
        position = self.starts.get(worker, _START)
        number, seed = position["batches"], mixed_seed(self.seed, ORDER_STREAM, self.rank, worker)
        key = stream_key(self.seed, SAMPLE_STREAM, self.rank, worker)
        stream = self.dataset
        if info is not None and _has_shared_epoch(stream):
            stream = copy.deepcopy(stream)  # workers would share the number of its pass, and each has its own
        passes = _Passes(stream, position, block_size=self.shuffle_buffer, seed=seed, key=key)
        rows: list[Any] = []
        while True:
            batch: Any = None
            saved = SavedGenerators()
            try:
                passes.open()  # first: it may read and drop samples
                if self.shuffle_buffer is None:
                    seed_generators(key, f"batch:{number}")
                rows += islice(passes.samples, self.batch_size - len(rows))
                is_over = len(rows) < self.batch_size
                is_batch = bool(rows) and (not is_over or self.drop_last is False)
                if is_batch:
                    if self.shuffle_buffer is not None:  # a block is read in the first of its batches only
                        seed_generators(key, f"batch:{number}")
                    batch = collated(self.collate_fn, rows)
            finally:
                saved.restore()
            if is_over:
                if passes.is_empty:
                    return
                self._check_drop(passes)
                passes.next_pass()
                if self.drop_last:
                    rows = []
            if is_batch:
                rows, number = [], number + 1
                if number == 1 and isinstance(stream, _EveryNth):
                    yield worker, stream.first_reads.values, _FIRST_READS
                yield worker, {"batches": number, **passes.position()}, batch
            if is_over and not self.infinite:
                if not is_batch:
                    yield worker, {"batches": number, **passes.position()}, _NO_BATCH
                return

    def _check_drop(self, passes: _Passes) -> None:
        if self.drop_last and passes.count < self.batch_size:
            raise DataError(
                f"{type(self.dataset).__name__}: a pass has fewer samples than a batch of {self.batch_size}, and"
                " shorter batches are dropped. Give a smaller batch_size, or drop_last=False"
                " (dataloader_drop_last=False)."
            )


def eval_stream_loader(
    stream: Any, batch_size: int, num_workers: int, collate_fn: Callable[[list[Any]], Any] | None
) -> Any:
    """A loader of one pass over a stream, for evaluation: each iteration yields all its samples, in its order."""
    if getattr(stream, "is_endless", False):
        raise ConfigError(
            f"{type(stream).__name__}: it has no end, so no evaluation or prediction of it would end; evaluate each of"
            " its streams."
        )
    samples = stream if isinstance(stream, IterableDataset) else _Iterable(check_stream(stream))
    collator = collate_fn or own_collator(stream) or collate
    return DataLoader(samples, batch_size, num_workers=_workers_of(stream, num_workers), collate_fn=collator)


class _Iterable(IterableDataset[Any]):
    def __init__(self, samples: Any) -> None:
        self._samples = samples

    def __iter__(self) -> Iterator[Any]:
        return iter(self._samples)


def check_stream(stream: Any) -> Any:
    """``stream``, unless it is an iterator, which can be iterated only once."""
    if isinstance(stream, Iterator):
        raise ConfigTypeError(
            f"Trainer: got a data set that is an iterator ({type(stream).__name__}), which can be iterated only once;"
            " pass an object whose __iter__ restarts, such as a torch IterableDataset."
        )
    return stream


class StreamLoader:
    """Batches of this rank's samples of a stream. ``state_dict`` is the position after the latest batch.

    Each rank, and each worker of it, passes again and again over its own share. A resume with the same number of ranks
    and workers continues exactly.

    Args:
        dataset: the stream; see the module for the methods that it may have.
        batch_size: samples in a batch of this rank.
        drop_last: of the last, shorter batch of a pass; None: batches run across the ends of passes.
        shuffle_buffer: shuffle in blocks of this number of samples; None: the order of the stream.
        infinite: with False, iteration ends at the end of a pass.

    Attributes:
        first_reads: the first samples that all ranks have read, as `FirstReads` has them; None: each reads others.

    Raises:
        ConfigTypeError: the stream is an iterator, which can be iterated only once.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        seed: int = 0,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        drop_last: bool | None = None,
        shuffle_buffer: int | None = None,
        infinite: bool = True,
        data_parallel_rank: int | None = None,
        data_parallel_size: int | None = None,
        mixup_func: Callable[..., Any] | None = None,
        **loader_options: Any,
    ) -> None:
        self.dataset, self.batch_size = check_stream(dataset), batch_size
        self.drop_last, self.mixup_func = drop_last, mixup_func
        self._rank = get_data_parallel_rank() if data_parallel_rank is None else data_parallel_rank
        self._world_size = get_data_parallel_size() if data_parallel_size is None else data_parallel_size
        self.infinite = infinite
        self.num_workers = _workers_of(dataset, num_workers)
        log_shuffle_buffer(dataset)
        self.reader = _StreamReader(
            shard_of_rank(dataset, self._rank, self._world_size),
            batch_size,
            collate_fn or own_collator(dataset) or collate,
            drop_last=drop_last,
            shuffle_buffer=shuffle_buffer,
            seed=seed,
            rank=self._rank,
        )
        self._options = {**loader_settings(seed, self.num_workers, self._rank, loader_options)}
        self._options.pop("persistent_workers", None)  # new ones start at the position
        self._read: deque[tuple[int, int, Position]] = deque()  # batch number, worker, position after it
        self.batches = 0  # read since the start of the run
        self.first_reads: list[Any] | None = None
        self._trained, self._positions = (-1, 0), dict[int, Position]()  # worker and number of the oldest kept batch

    def __len__(self) -> int:
        """The number of batches in a pass, for streams that know their number of samples."""
        samples = len(self.dataset)
        if self.drop_last:
            return samples // self._world_size // self.batch_size
        return -(-samples // (self._world_size * self.batch_size))

    def __iter__(self) -> Iterator[Any]:
        self.load_state_dict(self.state_dict())  # workers that have read ahead are closed
        dropped = sum(position["samples"] for position in self._positions.values())
        if dropped and not has_state(self.reader.dataset):
            name = type(self.dataset).__name__
            why = "does not save its shuffle buffer" if has_shuffle_buffer(self.dataset) else "has no state_dict"
            logger.info("%s %s: %d samples are read again and dropped.", name, why, dropped)
        self.reader.infinite = self.infinite
        loader = DataLoader(self.reader, None, num_workers=self.num_workers, collate_fn=unchanged, **self._options)
        items = iter(loader) if self.num_workers == 0 else WorkerBatches(loader)
        is_empty = True
        for item in items:
            if item is None:
                continue
            worker, position, batch = item
            if isinstance(batch, str) and batch == _FIRST_READS:
                self.first_reads = position
                continue
            is_empty, is_batch = False, not (isinstance(batch, str) and batch == _NO_BATCH)
            self.batches += is_batch
            self._read.append((self.batches, worker, position))
            if len(self._read) > _KEPT:
                self._pass_over()
            if is_batch:
                yield batch
        if is_empty or self.infinite:
            name = type(self.dataset).__name__
            raise ConfigError(
                f"{name}.__iter__ gave no sample when it was iterated again. It must return a new iterator each time."
                if self.batches
                else f"{name}: it yields no sample; it must yield at least one batch."
            )

    def state_dict(self, batches: int | None = None) -> dict[str, Any]:
        """The position after ``batches`` batches, by default after the latest one that was read."""
        while self._read and (batches is None or self._read[0][0] <= batches):
            self._pass_over()
        worker, number = self._trained
        return {
            "batches": number,
            "worker": worker,
            "workers": {str(worker): position for worker, position in self._positions.items()},
            "num_workers": self.num_workers,
            "num_ranks": self._world_size,
        }

    def peek(self, batches: int | None = None) -> Any:
        """The batch after that position, from a copy of a stream that has a state; None: it cannot be copied, or is
        read by workers. Random generators do not change."""
        if self.num_workers or not has_state(self.reader.dataset):
            return None
        other = copy.copy(self)
        other.reader, other._read, position = copy.copy(self.reader), deque(), self.state_dict(batches)
        try:
            other.reader.dataset = copy.deepcopy(self.reader.dataset)
            with kept_generators():
                other.load_state_dict(position)
                return next(iter(other))
        except Exception as error:  # of any class: a running iterator has no copy, for example
            logger.debug("%s: its state is not rehearsed (%s: %s).", type(self.dataset).__name__, type(error), error)
            return None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after a position with the next ``iter()``."""
        self._read.clear()
        self._positions = {int(worker): position for worker, position in state["workers"].items()}
        self._trained, self.batches = (state["worker"], state["batches"]), state["batches"]
        layout = {"num_workers": self.num_workers, "num_ranks": self._world_size}
        if state["batches"] and any(state[name] != value for name, value in layout.items()):
            before = f"{state['num_ranks']} ranks with {state['num_workers']} workers"
            epoch = min((position["epoch"] for position in self._positions.values()), default=0)
            logger.warning(
                "%s: its position was saved by %s, and there are %d with %d now. It starts again with pass %d, so that"
                " samples of this pass repeat. The same numbers continue exactly.",
                type(self.dataset).__name__, before, self._world_size, self.num_workers, epoch,
            )  # fmt: skip
            self._positions = {worker: {**_START, "epoch": epoch} for worker in range(max(1, self.num_workers))}
            self._trained = (-1, state["batches"])
        self.reader.starts, self.reader.last_worker = self._positions.copy(), self._trained[0]

    def __repr__(self) -> str:
        name = type(self.dataset).__name__
        return f"StreamLoader(<{name}>, batch_size={self.batch_size}, num_workers={self.num_workers})"

    def _pass_over(self) -> None:
        number, worker, position = self._read.popleft()
        self._positions[worker], self._trained = position, (worker, number)


def _workers_of(stream: Any, num_workers: int) -> int:
    """The number of workers: one at most for a stream that does not share its samples among them."""
    num_workers = allowed_workers(num_workers)
    if num_workers > 1 and not is_shared(stream):
        logger.info(
            "%s is read by 1 worker instead of %d: it has no method 'shard'. If its __iter__ yields the share of a"
            " worker and rank, set is_sharded = True on it.", type(stream).__name__, num_workers,
        )  # fmt: skip
        return 1
    return num_workers
