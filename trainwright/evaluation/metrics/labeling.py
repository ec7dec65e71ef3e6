"""Spans of labels, as seqeval counts them."""

from typing import Any

from trainwright.evaluation.metrics.metric import Metric
from trainwright.evaluation.metrics.packages import load_package


class Seqeval(Metric):
    """``accuracy`` of labels, and ``recall``, ``precision`` and ``f1`` of whole spans, over all spans (micro).

    Predictions and targets are lists of label texts for each sample, in a scheme such as IOB: ``B-name I-name O``.

    Args:
        mode, scheme: seqeval's own: ``mode="strict", scheme="IOB2"`` counts only spans that are rightly written.
    """

    name, all_keys = "seqeval", ("accuracy", "recall", "precision", "f1")
    default_objective = "maximize"

    def __init__(self, *, mode: str | None = None, scheme: str | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        self.mode, self.scheme = mode, scheme

    def values(self, predictions: Any, targets: Any) -> dict[str, float]:
        seqeval = load_package("seqeval.metrics", "The metric seqeval")
        scheme = None if self.scheme is None else getattr(load_package("seqeval.scheme", "seqeval"), self.scheme)
        settings = {"mode": self.mode, "scheme": scheme, "zero_division": 0}
        true, found = [list(labels) for labels in targets], [list(labels) for labels in predictions]
        return {
            "accuracy": float(seqeval.accuracy_score(true, found)),
            "recall": float(seqeval.recall_score(true, found, **settings)),
            "precision": float(seqeval.precision_score(true, found, **settings)),
            "f1": float(seqeval.f1_score(true, found, **settings)),
        }
