"""Predictions: a model's outputs for a data set, in the order of its samples, on every rank."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import repeat
from typing import Any

from torch import Tensor, nn

from trainwright.base.batch import described, joined, like, mapped, num_rows
from trainwright.base.dist import get_averaging_size, get_tensor_parallel_rank
from trainwright.base.errors import ConfigError
from trainwright.data.errors import batch_in_errors
from trainwright.data.seeding import kept_generators, rng_state, set_random_state
from trainwright.evaluation.loop import run_evaluation
from trainwright.evaluation.rank_exchange import even_rounds, gather_values, in_data_order
from trainwright.events.storage import EvaluationStorage
from trainwright.models.eval_mode import evaluation_mode
from trainwright.parallel.pipeline import pipeline_of
from trainwright.parallel.sharding import computes_together, gathered, reshard


def predict(
    model: nn.Module,
    read_batches: Callable[[], Iterable[Any]],
    step: Callable[[Any], Any],
    *,
    num_batches: int | None,
    is_single_pass: bool = True,
) -> Any:
    """The outputs of ``step`` for the batches of all ranks, joined, on every rank.

    ``read_batches`` returns the batches of this rank: every n-th batch of the data on n ranks. The model is in
    evaluation mode, as in :func:`~trainwright.evaluation.loop.run_evaluation`. ``is_single_pass``: ``step`` calls the
    model once.
    """
    outputs: list[Any] = []

    def joined() -> Any:
        if get_tensor_parallel_rank() > 0:
            outputs.clear()  # the first of these ranks has the same
        return join(in_data_order([read() or [] for read in gather_values(outputs, to_all=True) or ()]))

    return run_evaluation(
        model,
        read_batches,
        lambda batch: outputs.append(on_cpu(step(batch))),
        joined,
        num_samples=lambda batch: (num_rows(batch) or 0) * get_averaging_size(),
        num_batches=num_batches,
        without_batches="predict: the data yielded no batch. Pass data with at least one sample.",
        pad=step if is_single_pass else None,
    )


def iterate_predictions(
    model: nn.Module,
    read_batches: Callable[[], Iterable[Any]],
    step: Callable[[Any], Any],
    *,
    weights: Callable[[], AbstractContextManager[None]] = nullcontext,
    is_single_pass: bool = True,
) -> Iterator[Any]:
    """The outputs for each batch, one after another. Every rank yields the batches of all ranks.

    ``weights`` gives the model the weights to predict with, within a ``with`` statement. Between two batches, the model
    has the weights and the modes that it had before, and so have the random generators.
    """
    reader: Iterator[tuple[Any, bool]] | None = None
    is_joint = computes_together(model)
    pipeline = pipeline_of(model)
    if pipeline is not None:
        step = pipeline.evaluated(step, lambda: None)
    state = rng_state()
    while True:
        outputs, error = None, None
        try:
            with weights(), evaluation_mode(model), kept_generators(in_checkpoints=True), EvaluationStorage():
                set_random_state(state)  # each batch continues the draws of the one before
                if reader is None:  # a shuffled loader draws
                    reader = even_rounds(read_batches(), model) if is_joint else zip(read_batches(), repeat(True))
                for batch, is_counted in reader:
                    with nullcontext() if is_single_pass or not is_joint else gathered(model), batch_in_errors(batch):
                        found = step(batch)
                        found = None if found is None else [on_cpu(found)]
                    outputs = found if is_counted and get_tensor_parallel_rank() == 0 else None
                    break
                state = rng_state()
                reshard(model)
        except Exception as failure:
            if is_joint:
                raise
            error = failure
        reads = gather_values(outputs, error, to_all=True)
        if reads is None:
            return
        yield from (join(values) for read in reads if (values := read()) is not None)


def join(batches: Sequence[Any]) -> Any:
    """The outputs of several batches as one: tensors are concatenated, lists are chained, dicts and tuples by item.

    Tensors whose sizes differ beyond the first dimension become a list with one tensor for each sample. Items with no
    value for each sample, such as a loss, are left out.

    >>> join([{"scores": torch.zeros(2, 3), "loss": torch.tensor(0.5)}, {"scores": torch.ones(1, 3)}])["scores"].shape
    torch.Size([3, 3])
    """
    if not _has_samples(batches[0]):
        raise ConfigError(
            f"predict: the model returned {described(batches[0])} for a batch, which has no value for each sample."
            " It must return a tensor, or a dict or list of them, without labels as well as with labels."
        )
    return joined([_with_samples(batch) for batch in batches])


def _with_samples(value: Any) -> Any:
    """Without the items of mappings and tuples that have no samples."""
    if isinstance(value, Mapping):
        return {name: _with_samples(item) for name, item in value.items() if _has_samples(item)}
    if isinstance(value, tuple):
        items = [_with_samples(item) for item in value if _has_samples(item)]
        return like(value, items) if len(items) == len(value) else tuple(items)
    return value


def _has_samples(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dim() > 0
    if isinstance(value, Mapping | tuple):
        return any(map(_has_samples, value.values() if isinstance(value, Mapping) else value))
    return isinstance(value, list)


def on_cpu(value: Any) -> Any:
    """``value`` with its tensors detached and on the CPU; items that have no samples are left out."""
    return mapped(lambda one: one.detach().cpu() if isinstance(one, Tensor) else one, _with_samples(value))
