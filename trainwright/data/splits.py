"""Cut data sets into train, validation and test ranges, and mix the ranges of several data sets by weight."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from torch.utils.data import Dataset

from trainwright.config.errors import ConfigError

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
    """Contiguous, disjoint index ranges in these proportions; all together are ``range(length)``.

    >>> split_ranges(1000, [949, 50, 1])
    [range(0, 949), range(949, 999), range(999, 1000)]
    """
    total = sum(proportions)
    cuts = [round(length * sum(proportions[:number]) / total) for number in range(len(proportions) + 1)]
    return [range(start, stop) for start, stop in pairwise(cuts)]


def shares(total: int, weights: Sequence[float]) -> list[int]:
    """``total`` in whole numbers by weight, none of it lost: largest remainders first.

    >>> shares(10, [1, 1, 1])
    [4, 3, 3]
    """
    exact = [total * weight / sum(weights) for weight in weights]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda number: counts[number] - exact[number])
    for number in by_remainder[: total - sum(counts)]:
        counts[number] += 1
    return counts


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
    # Only training may see a sample twice: a metric counts each once.
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
    if weights is not None and len(weights) != num_datasets:
        faults.append(f"weights: got {len(weights)} for {num_datasets} data sets; give one each.")
    if weights is not None and (any(weight < 0 for weight in weights) or sum(weights) <= 0):
        faults.append(f"weights: got {list(weights)}; they must be >= 0 and not all 0.")
    if num_datasets > 1 and weights is not None and num_samples is None:
        faults.append(
            "weights: they say how many of train_val_test_num_samples each data set gives; give that as well, or "
            "no weights."
        )
    if num_samples is not None and (len(num_samples) != NUM_PARTS or any(n is not None and n < 0 for n in num_samples)):
        faults.append(
            f"train_val_test_num_samples: got {list(num_samples)}; it must be three numbers >= 0 (None: all there are)."
        )
    if faults:
        raise ConfigError("\n".join(f"build_nlp_train_val_test_loader.{fault}" for fault in faults))
