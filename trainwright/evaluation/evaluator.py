"""An evaluator computes metrics from the batches of a data set and the model's outputs; its results as text."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from trainwright.base.batch import described
from trainwright.base.errors import UserError
from trainwright.base.source_text import lacks_return
from trainwright.models.outputs import named_outputs
from trainwright.models.targets import target_of

logger = logging.getLogger("trainwright.evaluation")


class EvaluationError(UserError, ValueError):
    """A model, data set and evaluator that do not match."""


METHODS = {"reset", "process", "evaluate"}  # of every evaluator


@dataclass(slots=True)
class EvaluatedBatch:
    """A batch of an evaluation, as its metrics get it.

    Attributes:
        inputs: what the model gets.
        outputs: what it returns, or the user's own step of an evaluation.
        num_samples: None: unknown.
    """

    inputs: Any
    outputs: Any
    num_samples: int | None


class DatasetEvaluator:
    """Base class: override ``process``, and ``evaluate``, which returns a dictionary of metrics.

    The evaluation loop calls ``reset`` once, ``process`` for each batch in the order of the data set, and ``evaluate``
    once. Override ``merge_state``, too, if you evaluate on several ranks: without it, all batches are sent to rank 0.

    Attributes:
        batch_samples: the number of samples of the batch that ``process`` gets; None: read it from the batch.
    """

    batch_samples: int | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def reset(self) -> None:
        """Clear all state before a new evaluation."""

    def process(self, inputs: Any, outputs: Any) -> None:
        """Add one batch: ``inputs`` are the arguments of the model, ``outputs`` its result.

        Tensors may be on a device. Keep results there and read them in ``evaluate``: reading one here waits for it.
        """
        raise NotImplementedError(f"{type(self).__name__} must override process(inputs, outputs)")

    def evaluate(self) -> dict[str, Any]:
        """The metrics of all batches since ``reset``, by name; values are numbers or dictionaries of numbers."""
        raise NotImplementedError(f"{type(self).__name__} must override evaluate()")

    def merge_state(self, others: Sequence[Self]) -> None:
        """Add the state of ``others``, the evaluators of the other ranks, by rank, to this one's. Optional.

        With this method, each rank's evaluator processes the batches of its rank. Then the attributes of all are
        pickled and sent to rank 0, where this method and ``evaluate`` are called. Without it,
        and in a subclass that overrides ``reset``, ``process`` or ``evaluate`` but not this method, rank 0 processes
        the batches of all ranks, which is slower.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define merge_state(others)")

    def known_results(self) -> list[str] | None:
        """The names of all results of ``evaluate``; None if they are known only after an evaluation."""
        return None


class DatasetEvaluators(DatasetEvaluator):
    """Several evaluators as one: each processes every batch, and their metrics are merged."""

    def __init__(self, evaluators: Iterable[DatasetEvaluator]) -> None:
        self.evaluators = list(evaluators)

    def __repr__(self) -> str:
        return f"DatasetEvaluators({self.evaluators!r})"

    def reset(self) -> None:
        for evaluator in self.evaluators:
            evaluator.reset()

    def process(self, inputs: Any, outputs: Any) -> None:
        for evaluator in self.evaluators:
            evaluator.batch_samples = self.batch_samples
            evaluator.process(inputs, outputs)

    def evaluate(self) -> dict[str, Any]:
        """
        Raises:
            EvaluationError: two evaluators return a metric of the same name.
        """
        found = [(type(one).__name__, one.evaluate()) for one in self.evaluators]
        return merged_results((name, {} if metrics is None else metrics) for name, metrics in found)

    def known_results(self) -> list[str] | None:
        known = [evaluator.known_results() for evaluator in self.evaluators]
        return None if None in known else [name for names in known for name in names or ()]


def single_evaluators(evaluator: DatasetEvaluator) -> Iterator[DatasetEvaluator]:
    """The evaluators in ``DatasetEvaluators``, also in nested ones; one whose methods are overridden stays one."""
    if isinstance(evaluator, DatasetEvaluators) and not METHODS & own_names(evaluator, DatasetEvaluators):
        for one in evaluator.evaluators:
            yield from single_evaluators(one)
    else:
        yield evaluator


def own_names(evaluator: DatasetEvaluator, base: type) -> set[str]:
    """The attributes that an evaluator and the classes below ``base`` define."""
    kinds = type(evaluator).__mro__
    below = kinds[: kinds.index(base)]
    return set(vars(evaluator)).union(*(vars(kind) for kind in below))


def merged_results(results: Iterable[tuple[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """The results of several metrics, each with what errors call it.

    Raises:
        EvaluationError: two have a result of the same name.
    """
    merged: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for name, metrics in results:
        if not isinstance(metrics, Mapping):
            raise EvaluationError(
                f"{name} returned {type(metrics).__name__} as its metrics; it must return a dict of numbers by name,"
                " such as {'accuracy': accuracy}."
            )
        if twice := [key for key in metrics if key in merged]:
            raise EvaluationError(
                "evaluators: "
                + ", ".join(f"{key!r} is a metric of both {origin[key]} and {name}" for key in twice)
                + ". Rename it in one of them, or remove one."
            )
        merged.update(metrics)
        origin.update(dict.fromkeys(metrics, name))
    return merged


def required(values: Any, key: str, *, evaluator: DatasetEvaluator, where: str) -> Any:
    """``values[key]``; if it is missing, the error describes ``values``. ``where`` is "the batch", for example."""
    named = named_outputs(values)
    if named is not None and key in named:
        return named[key]
    # As models and data of the Python API name them, or have them in a pair.
    if key == "prediction_scores" and named is not None and "logits" in named:
        return named["logits"]
    if key == "labels" and (labels := target_of(values)) is not None:
        return labels
    raise EvaluationError(
        f"{type(evaluator).__name__} needs {key!r} in {where}, but got {described(values)}. Add it, or give the"
        " field this name. In a config file train.evaluation.evaluator=LazyCall(PPLEvaluator)() reads the losses alone,"
        " and train.evaluation.enabled=False evaluates nothing."
    )


def print_csv_format(results: Mapping[str, Any]) -> None:
    """Log metrics as comma-separated lines for a spreadsheet; each line begins with ``copypaste:``.

    A nested dictionary is a task: its name, the names of its metrics and their values are one line each.
    """
    plain = {key: value for key, value in results.items() if not isinstance(value, Mapping)}
    _log_table(plain)
    for task, metrics in results.items():
        if isinstance(metrics, Mapping):
            logger.info("copypaste: Task: %s", task)
            _log_table(flatten_results_dict(metrics))


def results_table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """The results of each data set as aligned columns; of a single one on one line.

    >>> print(results_table({"val": {"Acc@1": 90.0}, "test": {"Acc@1": 87.5, "loss": 0.5}}))
    Evaluation  Acc@1  loss
    val         90
    test        87.5   0.5
    """
    flat = {name: flatten_results_dict(metrics) for name, metrics in results.items()}
    metrics = list(dict.fromkeys(metric for row in flat.values() for metric in row))
    if len(flat) == 1:
        (row,) = flat.values()
        return f"Evaluation: {', '.join(f'{name} {_text(value)}' for name, value in row.items()) or 'no results'}"
    lines = [["Evaluation", *metrics]]
    lines += [
        [name, *(_text(row[metric]) if metric in row else "" for metric in metrics)] for name, row in flat.items()
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = ("  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)) for line in lines)
    return "\n".join(line.rstrip() for line in aligned)


def flatten_results_dict(results: Mapping[str, Any]) -> dict[str, Any]:
    """Nested metrics as a flat dictionary, with names joined by ``/``.

    >>> flatten_results_dict({"val": {"Acc@1": 90.0}, "loss": 0.5})
    {'val/Acc@1': 90.0, 'loss': 0.5}
    """
    flat: dict[str, Any] = {}
    for key, value in results.items():
        if isinstance(value, Mapping):
            flat.update({f"{key}/{inner}": metric for inner, metric in flatten_results_dict(value).items()})
        else:
            flat[key] = value
    return flat


def _log_table(metrics: Mapping[str, Any]) -> None:
    if metrics:
        logger.info("copypaste: %s", ",".join(map(str, metrics)))
        logger.info("copypaste: %s", ",".join(_text(value, ".4f") for value in metrics.values()))


def _text(value: Any, form: str = ".6g") -> str:
    """A number in this form; anything else as it is."""
    try:
        return format(float(value), form)
    except (TypeError, ValueError):
        return str(value)


def warn_of_no_results(function: Callable[..., Any], name: str) -> None:
    """Log a method for the results of an evaluation that has no ``return``."""
    if lacks_return(function):
        logger.warning(
            "%s has no return statement, so there are no results: return {'accuracy': value}. If there are none on"
            " purpose, return {}.", name,
        )  # fmt: skip
