"""The metrics handler of text classification."""

from typing import Any

import numpy as np

from trainwright.evaluation.evaluator import EvaluationError
from trainwright.evaluation.handlers import IGNORED_LABEL, MetricsHandler, paired_rows
from trainwright.evaluation.metrics.task_inference import shape_and_type


class TextClassificationMetricsHandler(MetricsHandler):
    """Scores (B, C) or class ids (B), and labels (B). Samples whose label is -100 do not count."""

    valid_metrics = ("accuracy", "recall", "precision", "f1")
    default_metrics = ("accuracy",)

    def process(self, predictions: Any, labels: Any, **batch: Any) -> tuple[list[Any], list[Any]]:
        pairs = [(_class(row), np.asarray(label)) for row, label in paired_rows(predictions, labels, self)]
        if any(found is None or label.size != 1 for found, label in pairs):
            raise EvaluationError(
                f"{type(self).__name__}: predictions {shape_and_type(predictions)} and labels {shape_and_type(labels)} "
                "do not fit; they must be scores (B, C) or class ids (B), and class ids (B)."
            )
        kept = [(found, label.item()) for found, label in pairs if label.item() != IGNORED_LABEL]
        return [found for found, _ in kept], [label for _, label in kept]


def _class(row: Any) -> Any:
    """The class of one sample: that with the highest score, or the value itself; None if it is neither."""
    scores = np.asarray(row)
    if scores.ndim == 1 and (scores.size > 1 or scores.dtype.kind == "f"):
        return int(scores.argmax())
    return scores.item() if scores.size == 1 and scores.dtype.kind != "f" else None
