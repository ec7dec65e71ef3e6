"""A function as a handler: for metrics that are two lines of the user's."""

from collections.abc import Callable, Mapping
from typing import Any

from trainwright.evaluation.evaluator import EvaluationError
from trainwright.evaluation.handlers.base import MetricsHandler


class FunctionHandler(MetricsHandler):
    """Call ``function(predictions, labels)`` once, with all samples of the data set; it gives figures by name.

    Raises:
        EvaluationError: it gives something else than a dict of numbers.
    """

    def __init__(self, function: Callable[[Any, Any], Mapping[str, Any]], trainer: Any = None) -> None:
        self._function = function
        super().__init__([], trainer)

    def compute_metrics(self, predictions: Any, labels: Any, **batch: Any) -> dict[str, float]:
        found = self._function(predictions, labels)
        name = getattr(self._function, "__name__", type(self._function).__name__)
        if not isinstance(found, Mapping):
            raise EvaluationError(f"metrics_handler: {name} returned {type(found).__name__}; it must return a dict.")
        return {key: float(value) for key, value in found.items()}
