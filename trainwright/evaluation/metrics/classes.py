"""Accuracy, precision, recall and F1 of class labels, counted exactly. N samples, C classes that occur."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainwright.config.errors import ConfigError
from trainwright.evaluation.evaluator import EvaluationError
from trainwright.evaluation.metrics.metric import Metric

Counts = NDArray[np.float64]
AVERAGES = ("macro", "micro", "weighted", "binary")


class Accuracy(Metric):
    """The share of samples whose class is right."""

    name, all_keys = "accuracy", ("accuracy",)
    default_objective = "maximize"

    def values(self, predictions: Any, targets: Any) -> dict[str, float]:
        found, true = class_labels(predictions, targets, self.name)
        return {"accuracy": float((found == true).sum()) / len(true)}


class _OfClasses(Metric):
    """A ratio per class, and its mean over the classes that occur in predictions or targets.

    Args:
        average: "macro" (each class counts the same), "weighted" (by its samples), "micro" (over all samples) or
            "binary" (of the class ``pos_label`` only).
    """

    def __init__(self, *, average: str = "macro", pos_label: Any = 1, **settings: Any) -> None:
        super().__init__(**settings)
        if average not in AVERAGES:
            raise ConfigError(f"metric {self.name}: average is {average!r}; it must be one of {', '.join(AVERAGES)}.")
        self.average, self.pos_label = average, pos_label

    def ratio(self, hits: Counts, found: Counts, true: Counts) -> Counts:
        """Of each class (C): how often it was found rightly, was found at all, and was true."""
        raise NotImplementedError

    def values(self, predictions: Any, targets: Any) -> dict[str, float]:
        found, true = class_labels(predictions, targets, self.name)
        classes, index = np.unique(np.concatenate([found, true]), return_inverse=True)
        found_N, true_N = index[: len(found)], index[len(found) :]
        counts = [
            np.bincount(labels_N, minlength=len(classes)).astype(np.float64)
            for labels_N in (found_N[found_N == true_N], found_N, true_N)
        ]
        if self.average == "binary":
            counts = [count[classes == self.pos_label] for count in counts]
        if self.average == "micro":
            counts = [count.sum(keepdims=True) for count in counts]
        ratios = self.ratio(*counts)
        weights = counts[2] if self.average == "weighted" else np.ones_like(ratios)
        total = float(weights.sum())
        return {self.name: float((ratios * weights).sum()) / total if total else 0.0}


class Precision(_OfClasses):
    """Of the samples that were given a class, the share that have it."""

    name, all_keys = "precision", ("precision",)
    default_objective = "maximize"

    def ratio(self, hits: Counts, found: Counts, true: Counts) -> Counts:
        return _divided(hits, found)


class Recall(_OfClasses):
    """Of the samples that have a class, the share that were given it."""

    name, all_keys = "recall", ("recall",)
    default_objective = "maximize"

    def ratio(self, hits: Counts, found: Counts, true: Counts) -> Counts:
        return _divided(hits, true)


class F1(_OfClasses):
    """The harmonic mean of precision and recall."""

    name, all_keys = "f1", ("f1",)
    default_objective = "maximize"

    def ratio(self, hits: Counts, found: Counts, true: Counts) -> Counts:
        return _divided(2 * hits, found + true)


def _divided(above: Counts, below: Counts) -> Counts:
    """0 where a class never occurs."""
    return np.divide(above, below, out=np.zeros_like(above), where=below > 0)


def class_labels(predictions: Any, targets: Any, name: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """One label per sample, of class labels or of scores (N, C)."""
    found, true = as_array(predictions), as_array(targets)
    if found.ndim == 2 and np.issubdtype(found.dtype, np.floating):
        found = found.argmax(axis=1)
    found, true = (
        labels.squeeze(1) if labels.ndim == 2 and labels.shape[1] == 1 else labels for labels in (found, true)
    )
    if found.shape != true.shape or true.ndim != 1:
        raise EvaluationError(
            f"metric {name}: predictions have shape {found.shape} and targets {true.shape}; both must be class labels "
            "(N,), or the predictions scores (N, C)."
        )
    if found.dtype.kind in "US" or true.dtype.kind in "US":
        return found.astype(str), true.astype(str)
    return found, true


def as_array(values: Any) -> NDArray[Any]:
    """A tensor on any device, an array or a list, as an array in memory."""
    to_host: Callable[[], Any] | None = getattr(values, "detach", None)
    if to_host is None:
        return np.asarray(values)
    tensor = to_host().cpu()
    return np.asarray(tensor.float() if tensor.is_floating_point() else tensor)
