"""Batches of predictions and labels: taken apart into samples, kept in memory, put together again."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, zip_longest
from typing import Any, TypeVar  # a model's outputs and a loader's labels may be anything

import numpy as np
import torch
from torch import Tensor

from trainwright.evaluation.evaluator import EvaluationError
from trainwright.evaluation.metrics.classes import as_array
from trainwright.evaluation.metrics.shapes import scores_of, shape_and_type

IGNORED_LABEL = -100
Batch = TypeVar("Batch")


def rows_of(values: Any) -> list[Any]:
    """One entry per sample of a tensor, an array or a list; tensors become arrays in memory."""
    values = scores_of(values) if isinstance(values, Mapping) else values
    if isinstance(values, Tensor | np.ndarray):
        return list(as_array(values))
    return [as_array(value) if isinstance(value, Tensor) else value for value in values]


def paired_rows(predictions: Any, labels: Any, handler: object) -> Iterator[tuple[Any, Any]]:
    """The rows of both, sample by sample.

    Raises:
        EvaluationError: they are not equally many.
    """
    some, others = rows_of(predictions), rows_of(labels)
    if len(some) != len(others):
        raise EvaluationError(
            f"{type(handler).__name__}: predictions {shape_and_type(predictions)} and labels {shape_and_type(labels)} "
            f"hold {len(some)} and {len(others)} samples; there must be one of each for every sample."
        )
    return zip(some, others, strict=True)


def on_host(value: Any) -> Any:
    """The same with tensors in memory, without gradient."""
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, Mapping):
        return {key: on_host(item) for key, item in value.items()}
    return type(value)(map(on_host, value)) if type(value) in (tuple, list) else value


def put_together(batches: Sequence[Any]) -> Any:
    """Batches as one: tensors and arrays joined, where their samples have one shape; else a list of samples."""
    first = batches[0]
    if all(isinstance(batch, Mapping) for batch in batches):
        return {key: put_together([batch[key] for batch in batches]) for key in first}
    if all(isinstance(batch, tuple) and len(batch) == len(first) for batch in batches):
        return tuple(put_together(list(parts)) for parts in zip(*batches, strict=True))
    for kind, join in ((Tensor, torch.cat), (np.ndarray, np.concatenate)):
        if all(isinstance(batch, kind) and batch.ndim for batch in batches):
            return _joined(batches, join)
    if all(isinstance(batch, list) for batch in batches):
        return list(chain.from_iterable(batches))
    return list(batches)


def _joined(batches: Sequence[Any], join: Callable[[list[Any]], Any]) -> Any:
    if len({(batch.shape[1:], batch.dtype) for batch in batches}) == 1:
        return join(list(batches))
    return [sample for batch in batches for sample in batch]


def in_order(shares: Sequence[Sequence[Batch]]) -> list[Batch]:
    """The batches of all ranks in the order of the data set: rank r has the r-th batch of each round."""
    absent = object()
    rounds = zip_longest(*shares, fillvalue=absent)
    return [batch for one_round in rounds for batch in one_round if batch is not absent]  # type: ignore[misc]
