"""Builders of loaders from data sets, samplers and collate functions; splits of data sets.

The builders for images are those for text, too. ``dataset`` is one map-style data set or a list of
them, joined by ``dataset_mixer``. ``sampler`` is one of

* None: the default sampler of the builder;
* a class or function, or a lazy node with ``_target_``: called with ``dataset, micro_batch_size, data_parallel_rank,
  data_parallel_size, seed`` (and ``consumed_samples`` for training) as keyword arguments. A node whose target takes
  none of these, such as torch's BatchSampler, is built as it is;
* an object that yields lists of indices.

Data sets, ``collate_fn`` and ``mixup_func`` may be lazy nodes, too: builders in a config are instantiated without
recursion.
"""

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice, pairwise
from typing import Any

from torch.utils.data import (
    ConcatDataset,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from trainwright.base.dist import (
    get_averaging_rank,
    get_averaging_size,
    get_data_parallel_rank,
    get_data_parallel_size,
)
from trainwright.base.errors import ConfigError, ConfigTypeError
from trainwright.base.signatures import read_signature
from trainwright.data.batch_loader import BatchLoader, make_loader, opened
from trainwright.data.mixture import mixed, shares
from trainwright.data.order import sample_lengths
from trainwright.data.sampler import CyclicSampler, EpochSampler, SingleRoundSampler, refuse_empty
from trainwright.data.streaming import StreamLoader, eval_stream_loader, is_stream, shard_of_rank
from trainwright.data.wrapped import own_collator

logger = logging.getLogger("trainwright.data")


def set_position(data_loader: Any, consumed_samples: int) -> bool:
    """Start a loader after ``consumed_samples`` of all ranks, counted over epochs. Returns whether it can start there.

    A loader of the user's own starts at its beginning, and that of a stream where its ``load_state_dict`` sets it.
    """
    set_consumed_samples = getattr(getattr(data_loader, "batch_sampler", None), "set_consumed_samples", None)
    if set_consumed_samples is not None:
        set_consumed_samples(consumed_samples)
    return set_consumed_samples is not None or isinstance(data_loader, StreamLoader)


def one_pass(data_loader: Any) -> Iterable[Any]:
    """Batches of a training loader's data set: in order, without the last shorter one, the same on all ranks.

    A user's own loader is read once, as it is.
    """
    sampler = getattr(data_loader, "batch_sampler", None)
    if not isinstance(sampler, CyclicSampler | EpochSampler):
        return islice(opened(data_loader), len(data_loader))
    size = sampler.micro_batch_size if isinstance(sampler, CyclicSampler) else sampler.batch_size
    size = min(size, len(data_loader.dataset))
    once = SingleRoundSampler(data_loader.dataset, size, drop_last=True)
    return make_loader(
        data_loader.dataset, once, seed=0, num_workers=0, collate_fn=data_loader.collate_fn, loader_options={}
    )


_SET_BY_LOADER = ("dataset", "micro_batch_size", "consumed_samples", "data_parallel_rank", "data_parallel_size")


def build_image_train_loader(
    dataset: Any,
    train_batch_size: int,
    test_batch_size: int | None = None,
    sampler: Any = None,
    num_workers: int = 4,
    consumed_samples: int = 0,
    seed: int = 0,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    dataset_mixer: Callable[[list[Any]], Any] = ConcatDataset,
    mixup_func: Callable[..., Any] | None = None,
    bucket_by_length: bool | str = False,
    shuffle_buffer: int | None = None,
    **loader_options: Any,
) -> tuple[BatchLoader | StreamLoader, None, None]:
    """An infinite loader of this rank's shuffled micro-batches, as ``(loader, None, None)``.

    The second and third place are for a validation and a test loader, which this builder does not create.
    ``train_batch_size`` is the micro-batch of one rank. ``test_batch_size`` is ignored: configs pass both sizes to all
    builders. ``dataset`` may be a stream, which ``shuffle_buffer`` shuffles: see :class:`StreamLoader`. The default
    sampler is ``CyclicSampler(shuffle=True)``. ``bucket_by_length``: put samples of similar length into a batch;
    True, or the name of the field that is measured (:func:`~.order.sample_lengths`).
    """
    joined = _joined(dataset, dataset_mixer)
    refuse_empty("build_image_train_loader: dataset", joined)
    check_stream_arguments(joined, sampler, bucket_by_length, shuffle_buffer)
    if is_stream(joined):
        loader = StreamLoader(
            joined,
            train_batch_size,
            seed=seed,
            num_workers=num_workers,
            collate_fn=_instantiated(collate_fn),
            mixup_func=_instantiated(mixup_func),
            shuffle_buffer=shuffle_buffer,
            **loader_options,
        )
        return loader, None, None
    # Only then: a sampler of the user's own takes the others.
    more = {"lengths": sample_lengths(joined, bucket_by_length)} if bucket_by_length else {}
    sampler = functools.partial(CyclicSampler, shuffle=True) if sampler is None else sampler
    made = make_loader(
        joined,
        _make_sampler(sampler, joined, train_batch_size, seed=seed, consumed_samples=consumed_samples, **more),
        seed=seed,
        num_workers=num_workers,
        collate_fn=_instantiated(collate_fn),
        mixup_func=_instantiated(mixup_func),
        loader_options=loader_options,
    )
    return made, None, None


def build_image_test_loader(
    dataset: Any,
    test_batch_size: int,
    sampler: Any = None,
    num_workers: int = 4,
    seed: int = 0,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    dataset_mixer: Callable[[list[Any]], Any] = ConcatDataset,
    **loader_options: Any,
) -> Any:
    """A loader of one pass in the data set's order, by default with ``SingleRoundSampler``, unshuffled."""
    joined = _joined(dataset, dataset_mixer)
    refuse_empty("build_image_test_loader: dataset", joined)
    if is_stream(joined):
        part = shard_of_rank(joined, get_averaging_rank(), get_averaging_size())
        loader = eval_stream_loader(part, test_batch_size, num_workers, _instantiated(collate_fn))
        loader.is_sharded = True
        return loader
    sampler, rank, size = SingleRoundSampler if sampler is None else sampler, get_averaging_rank(), get_averaging_size()
    ranks = {"data_parallel_rank": rank, "data_parallel_size": size}
    made = _make_sampler(sampler, joined, test_batch_size, seed=seed, **ranks)
    return make_loader(
        joined,
        made,
        seed=seed,
        num_workers=num_workers,
        collate_fn=_instantiated(collate_fn),
        loader_options=loader_options,
    )


build_nlp_train_loader, build_nlp_test_loader = build_image_train_loader, build_image_test_loader


def build_nlp_train_val_test_loader(
    dataset: Any,
    splits: Sequence[Sequence[float]],
    weights: Sequence[float] | None = None,
    train_val_test_num_samples: Sequence[int | None] | None = None,
    train_batch_size: int = 1,
    test_batch_size: int = 1,
    train_sampler: Any = None,
    test_sampler: Any = None,
    num_workers: int = 4,
    consumed_samples: int = 0,
    seed: int = 0,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    dataset_mixer: Callable[[list[Any]], Any] = ConcatDataset,
    bucket_by_length: bool | str = False,
    **loader_options: Any,
) -> tuple[BatchLoader | StreamLoader | None, Any, Any]:
    """Train, validation and test loader over contiguous parts of each data set; None for a part without samples.

    ``splits`` has a row of three proportions for each data set, or one row for all: ``[[949, 50, 1]]``. The
    indices of a data set are split into three contiguous, disjoint ranges in these proportions.

    ``train_val_test_num_samples`` is the number of samples of each part. Data set i gives a share of them by
    ``weights[i]`` (by the length of its range without weights): the first samples of its range; for training, a range
    that is too short is repeated. Validation and test never repeat a sample, so they may be smaller. None, for a part
    or for all, means each sample of the ranges once.
    """
    given = _dataset_list(dataset)
    train, *rest = train_val_test_datasets(given, splits, weights, train_val_test_num_samples, dataset_mixer)
    shared: dict[str, Any] = {"num_workers": num_workers, "seed": seed, "collate_fn": collate_fn, **loader_options}
    train_loader = None
    if train is not None:
        position: dict[str, Any] = {"consumed_samples": consumed_samples, "bucket_by_length": bucket_by_length}
        train_loader, _, _ = build_image_train_loader(
            train, train_batch_size, sampler=train_sampler, **position, **shared
        )
    validation_loader, test_loader = (
        None if part is None else build_image_test_loader(part, test_batch_size, test_sampler, **shared)
        for part in rest
    )
    return train_loader, validation_loader, test_loader


# A lazy call of a sampler in a configuration is made here, with the arguments that only the loader knows.
for _builder in (build_image_train_loader, build_image_test_loader, build_nlp_train_val_test_loader):
    vars(_builder)["builds_itself"] = {"sampler", "train_sampler", "test_sampler"}


# The samplers of torch that yield single indices; a subclass may yield lists of them.
_OF_INDICES = [
    one.__iter__
    for one in (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)
]


def _make_sampler(sampler: Any, dataset: Any, batch_size: int, **settings: Any) -> Any:
    given = {
        "dataset": dataset,
        "micro_batch_size": batch_size,
        "data_parallel_rank": get_data_parallel_rank(),
        "data_parallel_size": get_data_parallel_size(),
        **settings,
    }
    if _is_node(sampler) and not _takes_any(sampler, _SET_BY_LOADER):
        sampler = _instantiated(sampler)
    if _is_node(sampler):
        taken = [name for name in _SET_BY_LOADER if name in sampler]
        if taken:
            raise ConfigError(
                f"sampler: the loader itself sets {', '.join(taken)}; leave that out of the sampler's node."
            )
        # A seed in the node is the user's and stays.
        return _instantiated(sampler, **{name: value for name, value in given.items() if name not in sampler})
    if not callable(sampler):
        if not hasattr(sampler, "__iter__"):
            raise ConfigTypeError(
                f"sampler: got {sampler!r} ({type(sampler).__name__}); it must be a sampler class, a lazy node, or "
                "an object that yields lists of indices."
            )
        if getattr(type(sampler), "__iter__", None) in _OF_INDICES:
            kind = type(sampler).__name__
            raise ConfigTypeError(
                f"sampler: got a {kind} of torch, which yields single indices; the loader takes one that yields lists"
                f" of them: BatchSampler({kind}(...), batch_size={batch_size}, drop_last=True)."
            )
        return sampler
    try:
        read_signature(sampler).bind(**given)
    except TypeError as error:
        raise ConfigTypeError(
            f"sampler: {getattr(sampler, '__name__', sampler)!r} is called with {', '.join(given)}: {error}. "
            "Let it take these keyword arguments, or pass a ready sampler object."
        ) from error
    return sampler(**given)


def _takes_any(node: Mapping[str, Any], names: Iterable[str]) -> bool:
    """Whether a lazy call, which is none of a partial, takes arguments of these names."""
    from trainwright.config.lazy.instantiation import PARTIAL, locate_target

    try:
        parameters = read_signature(locate_target(node)).parameters
    except ValueError:  # written in C, without a signature
        return False
    return not node.get(PARTIAL, False) and any(name in parameters for name in names)


def _joined(dataset: Any, mixer: Callable[[list[Any]], Any]) -> Any:
    if isinstance(dataset, Mapping) and "_target_" not in dataset:
        return mixed({name: (_instantiated(part), weight) for name, (part, weight) in dataset.items()})
    given = _dataset_list(dataset)
    return given[0] if len(given) == 1 else mixer(given)


def _dataset_list(dataset: Any) -> list[Any]:
    from omegaconf import ListConfig  # here: the Python API does not need it

    is_list = isinstance(dataset, list | tuple | ListConfig)  # a range or another sequence is one data set
    given = [_instantiated(item) for item in (dataset if is_list else [dataset])]
    if not given:
        raise ConfigError("dataset: got an empty list; give a data set, or a list of one or more.")
    for number, item in enumerate(given):
        if len(given) == 1 and is_stream(item):
            continue
        if not hasattr(item, "__getitem__") or not hasattr(item, "__len__"):
            raise ConfigTypeError(
                f"dataset[{number}]: {type(item).__name__} lacks __len__ or __getitem__. Loaders read samples by "
                "index: define both."
            )
    return given


def check_stream_arguments(dataset: Any, sampler: Any, bucket_by_length: Any, shuffle_buffer: Any) -> None:
    """Refuse settings that a stream cannot have, and warn about one that only a stream has."""
    if not is_stream(dataset):
        if shuffle_buffer is not None:
            logger.warning("shuffle_buffer has no effect: %s is read by index.", type(dataset).__name__)
        return
    if sampler is not None or bucket_by_length:
        raise ConfigError(
            f"dataset: {type(dataset).__name__} is a stream, which has no sampler and no lengths; remove sampler and"
            " bucket_by_length. shuffle_buffer=1000 shuffles it."
        )
    if shuffle_buffer is not None and (not isinstance(shuffle_buffer, int) or shuffle_buffer < 1):
        raise ConfigError(f"shuffle_buffer: got {shuffle_buffer!r}; it must be a whole number >= 1, or None.")


def _is_node(value: Any) -> bool:
    return isinstance(value, Mapping) and "_target_" in value


def _instantiated(value: Any, **arguments: Any) -> Any:
    if not _is_node(value):
        return value
    from trainwright.config.lazy.instantiation import instantiate

    return instantiate(value, **arguments)


NUM_PARTS = 3  # train, validation, test


class DatasetPart(Dataset[Any]):
    """``count`` samples of ``dataset``, from ``start`` on; after ``start + length`` it wraps around to ``start``.

    >>> list(DatasetPart("abcdef", start=2, length=3, count=5))
    ['c', 'd', 'e', 'c', 'd']
    """

    def __init__(self, dataset: Any, start: int, length: int, count: int) -> None:
        self.dataset = dataset
        self.start = start
        self.length = length
        self.count = count

    @property
    def data_collator(self) -> Any:
        """The collator of the data set."""
        return own_collator(self.dataset)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.count:
            raise IndexError(f"sample {index} of a part of {self.count} samples")
        return self.dataset[self.start + index % self.length]

    def __repr__(self) -> str:
        name = type(self.dataset).__name__
        return f"DatasetPart(<{name}>, start={self.start}, length={self.length}, count={self.count})"


def split_ranges(length: int, proportions: Sequence[float]) -> list[range]:
    """Contiguous, disjoint index ranges in these proportions; together they are ``range(length)``.

    >>> split_ranges(1000, [949, 50, 1])
    [range(0, 949), range(949, 999), range(999, 1000)]
    """
    total = sum(proportions)
    cuts = [round(length * sum(proportions[:number]) / total) for number in range(len(proportions) + 1)]
    return [range(start, stop) for start, stop in pairwise(cuts)]


def train_val_test_datasets(
    datasets: Sequence[Any],
    splits: Sequence[Sequence[float]],
    weights: Sequence[float] | None,
    num_samples: Sequence[int | None] | None,
    mixer: Callable[[list[Any]], Any],
) -> list[Any]:
    """The three data sets, None for one without samples. See `build_nlp_train_val_test_loader` for what they hold."""
    _check(len(datasets), splits, weights, num_samples)
    rows = list(splits) * len(datasets) if len(splits) == 1 else splits
    ranges = [split_ranges(len(dataset), row) for dataset, row in zip(datasets, rows, strict=True)]
    wanted = num_samples or (None, None, None)
    mixed: list[Any] = []
    for part in range(NUM_PARTS):
        lengths = [row[part].stop - row[part].start for row in ranges]
        counts = _counts(lengths, weights, wanted[part], repeat=part == 0)
        parts = [
            DatasetPart(dataset, row[part].start, length, count)
            for dataset, row, length, count in zip(datasets, ranges, lengths, counts, strict=True)
            if count
        ]
        mixed.append(mixer(parts) if len(parts) > 1 else parts[0] if parts else None)
    return mixed


def _counts(lengths: list[int], weights: Sequence[float] | None, total: int | None, *, repeat: bool) -> list[int]:
    if total is None or not any(lengths):
        return lengths
    shown = [weight if length else 0.0 for length, weight in zip(lengths, weights or lengths, strict=True)]
    counts = shares(total, shown) if any(shown) else [0] * len(lengths)
    # Only training may repeat a sample: a metric counts each once.
    return counts if repeat else [min(count, length) for count, length in zip(counts, lengths, strict=True)]


def _check(
    num_datasets: int,
    splits: Sequence[Sequence[float]],
    weights: Sequence[float] | None,
    num_samples: Sequence[int | None] | None,
) -> None:
    faults = []
    if len(splits) not in (1, num_datasets):
        faults.append(
            f"splits: got {len(splits)} rows for {num_datasets} data sets; give one row for all, or one row each."
        )
    for number, row in enumerate(splits):
        if len(row) != NUM_PARTS or any(value < 0 for value in row) or sum(row) <= 0:
            faults.append(
                f"splits[{number}]: got {list(row)}; it must be three proportions >= 0, not all 0, for example "
                "[949, 50, 1]."
            )
    if weights is not None:
        faults += _weight_faults(weights, num_datasets, has_num_samples=num_samples is not None)
    if num_samples is not None and (len(num_samples) != NUM_PARTS or any(n is not None and n < 0 for n in num_samples)):
        faults.append(
            f"train_val_test_num_samples: got {list(num_samples)}; it must be three numbers >= 0 (None: all there are)."
        )
    if faults:
        raise ConfigError("\n".join(f"build_nlp_train_val_test_loader.{fault}" for fault in faults))


def _weight_faults(weights: Sequence[float], num_datasets: int, *, has_num_samples: bool) -> Iterator[str]:
    if len(weights) != num_datasets:
        yield f"weights: got {len(weights)} for {num_datasets} data sets; give one each."
    if any(weight < 0 for weight in weights) or sum(weights) <= 0:
        yield f"weights: got {list(weights)}; they must be >= 0 and not all 0."
    if num_datasets > 1 and not has_num_samples:
        yield (
            "weights: they are the shares of the data sets in train_val_test_num_samples; set that as well, or "
            "no weights."
        )
