"""The names that a data set has for its samples: identifiers or file names, for messages and tables."""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any

from torch.utils.data import SequentialSampler

from trainwright.data.sampler import SingleRoundSampler

_ATTRIBUTES = ("sample_names", "sample_ids", "ids", "paths", "files", "filenames", "imgs", "samples", "image_paths")
_COLUMNS = ("id", "sample_id", "path", "file", "file_name", "filename", "name")  # of the package datasets
_SHOWN = 8


def sample_name(dataset: Any, index: int) -> str | None:
    """The data set's own name of sample ``index``; None if it has none.

    It is the result of the method ``sample_name(index)``, or an item of one of the attributes ``sample_names``,
    ``sample_ids``, ``ids``, ``paths``, ``files``, ``filenames``, ``imgs``, ``samples`` and ``image_paths``, if that has
    an item for each sample, which is a text, a path or a number, or a tuple that starts with one, as in torchvision. A
    data set of the package ``datasets`` has names in a column ``id``, ``path``, ``file`` … Subsets, concatenations and
    mixtures ask their parts. No sample is read.

    >>> class Photos:
    ...     paths = ["a/1.png", "a/2.png"]
    ...     def __len__(self): return 2
    >>> sample_name(Photos(), 1), sample_name([10, 20], 1)
    ('a/2.png', None)
    """
    own = getattr(dataset, "sample_name", None)
    if callable(own):
        return str(own(index))
    part = _part(dataset, index)
    if part is not None:
        return sample_name(*part)
    columns = getattr(dataset, "column_names", None)
    if isinstance(columns, list) and callable(getattr(dataset, "select_columns", None)):
        column = next((name for name in _COLUMNS if name in columns), None)
        return None if column is None else _text(dataset.select_columns([column])[index][column])
    for attribute in _ATTRIBUTES:
        names = getattr(dataset, attribute, None)
        if isinstance(names, Sequence) and not isinstance(names, str) and len(names) == len(dataset):
            return _text(names[index])
    return None


def index_of_place(loader: Any) -> tuple[Callable[[int], int] | None, Any]:
    """The index in the data set of the sample at a place of the evaluation, if it is known; and the data set."""
    dataset, sampler = getattr(loader, "dataset", None), getattr(loader, "batch_sampler", None)
    if not hasattr(dataset, "__getitem__"):
        return None, None
    if isinstance(sampler, SingleRoundSampler):
        return sampler.index_at, dataset
    if isinstance(getattr(sampler, "sampler", None), SequentialSampler):
        return int, dataset
    return None, dataset


def shown_samples(dataset: Any, indices: Iterable[int], at_most: int = _SHOWN) -> str:
    """Samples by their indices, with their names, as text.

    >>> shown_samples([0] * 40, range(10), at_most=3)
    '0, 1, 2, … (10 in all)'
    """
    indices = list(indices)
    named = ((index, sample_name(dataset, index)) for index in islice(indices, at_most))
    text = ", ".join(str(index) if name in (None, str(index)) else f"{index} ({name})" for index, name in named)
    return text + (f", … ({len(indices):,} in all)" if len(indices) > at_most else "")


def _part(dataset: Any, index: int) -> tuple[Any, int] | None:
    """The data set inside a subset, a concatenation or a mixture that has the sample, and its index there."""
    many = getattr(dataset, "datasets", None)
    if isinstance(many, Sequence):
        ends = getattr(dataset, "cumulative_sizes", None)
        if ends is None or index >= ends[-1]:
            return None
        number = bisect_right(ends, index)
        return many[number], index - (ends[number - 1] if number else 0)
    inner = getattr(dataset, "dataset", None)
    if inner is None or not hasattr(inner, "__len__"):
        return None
    indices = getattr(dataset, "indices", None)
    if indices is not None:
        return inner, int(indices[index])
    if hasattr(dataset, "start") and hasattr(dataset, "length"):  # DatasetPart
        return inner, dataset.start + index % dataset.length
    return (inner, index) if len(inner) == len(dataset) else None


def _text(name: Any) -> str | None:
    if isinstance(name, tuple | list) and name:
        name = name[0]
    if isinstance(name, bool) or not (isinstance(name, str | int) or hasattr(name, "__fspath__")):
        return None
    return str(name)
