"""Loaders of the Python API: those of a data set, and of streams with or without a length."""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain, islice
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from trainwright.base.dist import (
    all_gather_object,
    get_averaging_rank,
    get_averaging_size,
    get_data_parallel_rank,
    get_data_parallel_size,
)
from trainwright.base.errors import ConfigTypeError
from trainwright.config.spec import RunSpec
from trainwright.data.batch_loader import can_pin_memory, make_loader, opened
from trainwright.data.batches import Repeated, source_of
from trainwright.data.loaders import check_stream_arguments
from trainwright.data.order import sample_lengths
from trainwright.data.same_samples import Data, FirstReads, check_first_reads
from trainwright.data.sample_count import SampleCounter
from trainwright.data.sampler import (
    EpochSampler,
    SingleRoundSampler,
    is_drawn_by_process,
    is_in_order,
    is_shuffled,
    refuse_empty,
    sampler_of,
)
from trainwright.data.streaming import StreamLoader, eval_stream_loader, is_stream, order_of_stream
from trainwright.evaluation.loop import batch_limit

logger = logging.getLogger("trainwright.engine")


def train_loader(dataset: Any, spec: RunSpec, collator: Callable[[list[Any]], Any] | None, steps_done: int) -> Any:
    """A loader of one epoch's batches after another, starting after ``steps_done`` batches."""
    refuse_empty("Trainer.train_dataset", dataset)
    check_stream_arguments(dataset, None, spec.bucket_by_length, spec.shuffle_buffer)
    if is_stream(dataset):
        return StreamLoader(
            dataset,
            spec.batch_size,
            seed=spec.seed,
            drop_last=spec.dataloader_drop_last,
            num_workers=spec.dataloader_num_workers,
            shuffle_buffer=spec.shuffle_buffer,
            collate_fn=collator,
            infinite=False,
            pin_memory=spec.dataloader_pin_memory and can_pin_memory(),
        )
    sampler = EpochSampler(
        dataset,
        spec.batch_size,
        shuffle=spec.dataloader_shuffle and spec.overfit_batches is None,
        drop_last=spec.dataloader_drop_last,
        seed=spec.seed,
        data_parallel_rank=get_data_parallel_rank(),
        data_parallel_size=get_data_parallel_size(),
        lengths=None if spec.overfit_batches else sample_lengths(dataset, spec.bucket_by_length),
        limit=spec.overfit_batches or spec.limit_train_batches,
        keeps_batches=spec.overfit_batches is not None,
    )
    sampler.infinite = False
    sampler.set_batches_done(steps_done)
    return _loader(dataset, sampler, spec, collator)


def each(data: Any) -> list[Any]:
    """Data sets or loaders: those of a dict, or the one."""
    return list(data.values()) if isinstance(data, Mapping) else [data]


def is_dataset(data: Any) -> bool:
    """Whether ``data`` yields samples instead of batches."""
    return isinstance(data, IterableDataset) or hasattr(data, "__getitem__")


def is_own_loader(loader: Any) -> bool:
    """Whether a loader was built by ``train_loader``, and so can start anywhere."""
    return isinstance(getattr(loader, "batch_sampler", None), EpochSampler)


def num_left_out(loader: Any) -> int:
    """The samples that each epoch leaves out, because its last batch would not be complete."""
    sampler = getattr(loader, "batch_sampler", None)
    if not isinstance(sampler, EpochSampler) or not sampler.drop_last:
        return 0
    left_out = sampler.data_size - sampler.samples_per_epoch
    return left_out if left_out < sampler.global_batch_size else 0  # otherwise the user limits the epoch


def warn_of_left_out(loader: Any, name: str) -> None:
    """Warn of a loader to evaluate that leaves out the samples of its last, shorter batch, or may do so."""
    batches: Any = getattr(loader, "batch_sampler", None)
    if not getattr(loader if batches is None else batches, "drop_last", False):
        return
    left_out: int | None
    try:
        if isinstance(batches, SingleRoundSampler):
            left_out = batches.data_size % batches.micro_batch_size
        else:
            left_out = num_left_out(loader) if is_own_loader(loader) else len(batches.sampler) % batches.batch_size
    except (AttributeError, TypeError, NotImplementedError):  # a stream, or a sampler of the user's
        left_out = None
    if left_out != 0:
        verb = "may leave" if left_out is None else "leaves"
        logger.warning("%s %s out its last, shorter batch: build it with drop_last=False.", name, verb)


def warn_of_predicted(loader: Any, name: str) -> None:
    """Warn of a loader whose predictions are not those of all samples, in their order."""
    if not is_in_order(loader):
        logger.warning(
            "%s: the outputs are not in the order of the samples: the loader has another one (%s). Pass the data set,"
            " or a loader that does not shuffle.", name, type(sampler_of(loader)).__name__,
        )  # fmt: skip
    warn_of_left_out(loader, f"{name}: the loader")


def warn_of_unsharded(loader: Any, name: str) -> None:
    """Warn if each of several processes reads all batches of a user's loader, with a sampler of torch."""
    num_processes = get_data_parallel_size()
    if num_processes == 1 or is_own_loader(loader):
        return
    batches, sampler = getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)
    if batches is not None:
        sampler = batches.sampler if type(batches) is BatchSampler else None  # another one may know the processes
    values = {SubsetRandomSampler: "indices", WeightedRandomSampler: "weights"}.get(type(sampler))
    held = all_gather_object(hash(tuple(map(float, getattr(sampler, values)))) if values else None)
    if isinstance(sampler, RandomSampler | SequentialSampler) or (values and len(set(held)) == 1):
        logger.warning(
            "%s: each of the %d processes reads all of its batches (%s). Use a torch.utils.data.DistributedSampler, or"
            " another one that gives each its share.", name, num_processes, type(sampler).__name__,
        )  # fmt: skip


def eval_loader(
    dataset: Any, spec: RunSpec, collator: Callable[[list[Any]], Any] | None, batch_size: int | None = None
) -> Any:
    """A loader of one pass: every sample once, in order, on one of the processes."""
    batch_size = batch_size or spec.eval_batch_size
    assert batch_size is not None, "resolved when the settings were made"
    refuse_empty("Trainer.eval_dataset", dataset)
    if is_stream(dataset):
        return eval_stream_loader(dataset, batch_size, spec.dataloader_num_workers, collator)
    rank, size = get_averaging_rank(), get_averaging_size()
    sampler = SingleRoundSampler(dataset, batch_size, data_parallel_rank=rank, data_parallel_size=size)
    return _loader(dataset, sampler, spec, collator)


def batches_of_rank(loader: Iterable[Any]) -> Iterator[Any]:
    """This rank's batches of an evaluation: every sample is in one batch of one rank."""
    if not _is_split(loader):
        return opened(loader)
    rank, size = get_averaging_rank(), get_averaging_size()
    if is_drawn_by_process(loader):
        logger.warning(
            "The passed %s shuffles differently on each process, so some samples are read more than once and others not"
            " at all. Pass a data set, or a loader that does not shuffle.",
            type(loader).__name__,
        )
    return (batch for number, batch in enumerate(_compared(loader)) if number % size == rank)


def _compared(loader: Any) -> Iterator[Any]:
    """The batches of an evaluated loader that all processes read; of a stream, the first one must be the same on all.

    One that workers read may be random: that numbers are drawn is not seen there.
    """
    dataset, reads = getattr(loader, "dataset", None), FirstReads()
    if not is_stream(dataset) or getattr(loader, "num_workers", None):
        return opened(loader)
    batches = reads.of(opened(loader), dataset)
    return chain(map(partial(_after_comparison, reads, type(dataset).__name__), islice(batches, 1)), batches)


def _after_comparison(reads: FirstReads, name: str, batch: Any) -> Any:
    check_first_reads(f"Evaluation of {name}", reads.values, "batch")
    return batch


def samples_of_rank(loader: Any) -> SampleCounter:
    """Counts the samples of the batches of :func:`batches_of_rank`."""
    rank, size = (get_averaging_rank(), get_averaging_size()) if _is_split(loader) else (0, 1)
    return SampleCounter(loader, first=rank, every=size)


def num_rounds(loader: Any) -> int | None:
    """The number of batches that the rank with most has in an evaluation, if it is known."""
    try:
        return math.ceil(len(loader) / (1 if _is_sharded(loader) else get_averaging_size()))
    except (TypeError, NotImplementedError):  # a generator, or a loader over a stream
        return None


def eval_limit(loader: Any, spec: RunSpec) -> int | None:
    """The number of batches that the rank with most evaluates; None: all, of a number that is not known."""
    limit = spec.overfit_batches or spec.limit_eval_batches
    return batch_limit(num_rounds(loader), limit, setting=spec.where("limit_eval_batches"), loader=loader)


def log_limit(loader: Any, spec: RunSpec) -> None:
    """Log that a setting leaves out batches of the data that ``Trainer.evaluate`` gets."""
    number, limit = num_rounds(loader), eval_limit(loader, spec)
    if number is not None and limit is not None and limit < number:
        names = ("fast_dev_run", "overfit_batches", "limit_eval_batches")
        setting = next(name for name in names if getattr(spec, name))
        logger.info("Trainer.evaluate: %d of %d batches (%s).", limit, number, spec.where(setting))


def overfit_loader(loader: Any, dataset: Any, spec: RunSpec, collator: Any) -> Any:
    """A loader of an evaluation that begins with the batches of the training ``loader``."""
    if is_own_loader(loader):
        return eval_loader(dataset, spec, collator, spec.batch_size)
    if is_shuffled(loader):
        logger.warning(
            "TrainingConfig.overfit_batches: the passed loader shuffles, so its first batches differ between epochs."
            " Pass a data set, or a loader that does not shuffle."
        )
    return loader


def shared_data(loader: Any, *, is_evaluated: bool) -> Data | None:
    """The data of a loader of which each process reads a share by index; None: none, or that is not declared.

    It is declared by a sampler of this library or a DistributedSampler. Of another loader of an evaluation, each
    process takes some of the batches.
    """
    loader = source_of(loader)
    dataset, samplers = getattr(loader, "dataset", None), [getattr(loader, name, None) for name in _SAMPLERS]
    if dataset is None:
        return None
    if is_stream(dataset):
        is_split = isinstance(loader, StreamLoader) or (is_evaluated and _is_split(loader))
        order = order_of_stream(dataset) if is_split else {}
        return Data(None, order) if order else None
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        return None
    sampler = next((one for one in samplers if _has_ranks(one)), None)
    if sampler is not None:
        order = {"the seed of its order": getattr(sampler, "seed", None), "shuffle": getattr(sampler, "shuffle", None)}
        return Data(dataset, order)
    is_whole = is_evaluated and _is_split(loader) and isinstance(samplers[1], SequentialSampler)
    return Data(dataset, {}) if is_whole else None


_SAMPLERS = ("batch_sampler", "sampler")


def _has_ranks(sampler: Any) -> bool:
    """Whether a sampler divides its data among all processes, and not among those of one machine, for example."""
    number = getattr(sampler, "data_parallel_size", None)
    if number is None and isinstance(sampler, DistributedSampler):
        number = sampler.num_replicas
    return number in (get_data_parallel_size(), get_averaging_size())


def _is_split(loader: Any) -> bool:
    """Whether each rank reads some of the batches of a loader that has those of all ranks."""
    is_own_share = any(getattr(part, "is_sharded", False) for part in (loader, getattr(loader, "dataset", None)))
    # A stream may yield only the samples of this rank.
    return get_averaging_size() > 1 and not _is_sharded(loader) and not is_own_share


def _is_sharded(loader: Any) -> bool:
    """Whether a loader is one of this library's for several ranks, or has a DistributedSampler of torch."""
    samplers = (getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None))
    return any(getattr(s, name, 1) > 1 for s in samplers for name in ("data_parallel_size", "num_replicas"))


def _loader(dataset: Any, sampler: Any, spec: RunSpec, collator: Callable[[list[Any]], Any] | None) -> Any:
    return make_loader(
        dataset,
        sampler,
        seed=spec.seed,
        num_workers=spec.dataloader_num_workers,
        collate_fn=collator,
        loader_options={} if spec.dataloader_pin_memory else {"pin_memory": False},
    )


def with_length(loader: Any, limit: int | float | None, max_steps: int | float | None) -> Any:
    """``loader``, or if it has no length, epochs of ``limit`` batches of it, or one of ``max_steps``."""
    try:
        len(loader)
    except TypeError as error:
        length = limit or max_steps
        if not isinstance(length, int):
            name = f"train_dataloader: {type(loader).__name__} has no length ({error}); add a __len__, or"
            if isinstance(loader, StreamLoader):
                name = f"train_dataset: the stream {type(loader.dataset).__name__} has no length;"
            raise ConfigTypeError(
                f"Trainer.{name} set TrainingConfig.max_steps, the number of steps of the run, or limit_train_batches,"
                " those of each epoch."
            ) from error
        return Repeated(loader, length)
    return loader
