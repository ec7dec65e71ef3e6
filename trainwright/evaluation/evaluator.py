"""An evaluator computes metrics from the batches of a data set and the model's outputs."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from trainwright.config.errors import UserError


class EvaluationError(UserError, ValueError):
    """A model, data set and evaluator that do not match."""


class DatasetEvaluator:
    """Base class: override ``process``, and ``evaluate``, which returns a dictionary of metrics.

    The evaluation loop calls ``reset`` once, ``process`` for each batch in the order of the data set, and ``evaluate``
    once; all of it on rank 0, which sees the batches of all ranks.
    """

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

    def known_results(self) -> list[str] | None:
        """The names of all results of ``evaluate``; None if they are known only after an evaluation."""
        return None


class DatasetEvaluators(DatasetEvaluator):
    """Several evaluators as one: each processes every batch, and their metrics are merged."""

    def __init__(self, evaluators: Iterable[DatasetEvaluator]) -> None:
        self._evaluators = list(evaluators)

    def __repr__(self) -> str:
        return f"DatasetEvaluators({self._evaluators!r})"

    def reset(self) -> None:
        for evaluator in self._evaluators:
            evaluator.reset()

    def process(self, inputs: Any, outputs: Any) -> None:
        for evaluator in self._evaluators:
            evaluator.process(inputs, outputs)

    def evaluate(self) -> dict[str, Any]:
        """
        Raises:
            EvaluationError: two evaluators return a metric of the same name.
        """
        results: dict[str, Any] = {}
        origin: dict[str, str] = {}
        for evaluator in self._evaluators:
            name = type(evaluator).__name__
            metrics = evaluator.evaluate() or {}
            twice = [key for key in metrics if key in results]
            if twice:
                raise EvaluationError(
                    "evaluators: "
                    + ", ".join(f"{key!r} is a metric of both {origin[key]} and {name}" for key in twice)
                    + ". Rename it in one of them, or remove one."
                )
            results.update(metrics)
            origin.update(dict.fromkeys(metrics, name))
        return results

    def known_results(self) -> list[str] | None:
        known = [evaluator.known_results() for evaluator in self._evaluators]
        return None if None in known else [name for names in known for name in names or ()]


def required(values: Any, key: str, *, evaluator: DatasetEvaluator, where: str) -> Any:
    """``values[key]``; if it is missing, the error describes ``values``. ``where`` is "the batch", for example."""
    if isinstance(values, Mapping) and key in values:
        return values[key]
    raise EvaluationError(f"{type(evaluator).__name__} needs {key!r} in {where}, but got {described(values)}.")


def described(values: Any) -> str:
    """A short description of a model's or a loader's output, for an error message."""
    if isinstance(values, Mapping):
        return "a dictionary with the keys " + ", ".join(map(repr, values)) if values else "an empty dictionary"
    if isinstance(values, Tensor):
        return f"a Tensor of shape {tuple(values.shape)}"
    return type(values).__name__
