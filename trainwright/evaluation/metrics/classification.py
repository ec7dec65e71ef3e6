"""Accuracy, precision, recall and F1 of class labels, and of labeled spans. N samples, C classes that occur.

Not torchmetrics: results are exact ratios in float64 (torchmetrics gives 1/3 as 0.33333334), labels may be texts, and a
run with a task need not import torchmetrics, which takes seconds.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from trainwright.config.errors import ConfigError
from trainwright.evaluation.evaluator import EvaluationError
from trainwright.evaluation.metrics.metric import Metric, load_package

Counts = NDArray[np.int64]
AVERAGES = ("macro", "micro", "weighted", "binary")


class Accuracy(Metric):
    """The fraction of samples with the right class."""

    name, all_keys = "accuracy", ("accuracy",)
    default_objective = "maximize"

    def values(self, predictions: Any, targets: Any) -> dict[str, float]:
        found_N, true_N = class_labels(predictions, targets, self.name)
        return {"accuracy": float((found_N == true_N).sum()) / len(true_N)}


class _RatioOfClasses(Metric):
    """A ratio per class, and its mean over the classes that occur in predictions or targets; 0 without samples.

    Args:
        average: "macro" (each class has the same weight), "weighted" (by its samples), "micro" (over all samples) or
            "binary" (of the class ``pos_label`` only).
    """

    default_objective = "maximize"

    def __init__(self, *, average: str = "macro", pos_label: Any = 1, **settings: Any) -> None:
        super().__init__(**settings)
        if average not in AVERAGES:
            raise ConfigError(f"metric {self.name}: average is {average!r}; it must be one of {', '.join(AVERAGES)}.")
        self.average, self.pos_label = average, pos_label

    def ratio(self, hits_C: Counts, found_C: Counts, true_C: Counts) -> tuple[Counts, Counts]:
        """Numerator and denominator for each class, of how often it is predicted rightly, predicted, and true."""
        raise NotImplementedError

    def values(self, predictions: Any, targets: Any) -> dict[str, float]:
        found_N, true_N = class_labels(predictions, targets, self.name)
        classes, index = np.unique(np.concatenate([found_N, true_N]), return_inverse=True)
        found_N, true_N = index[: len(found_N)], index[len(found_N) :]
        counts = [np.bincount(some, minlength=len(classes)) for some in (found_N[found_N == true_N], found_N, true_N)]
        if self.average == "binary":
            counts = [count[classes == self.pos_label] for count in counts]
        if self.average == "micro":
            counts = [count.sum(keepdims=True) for count in counts]
        above, below = self.ratio(*counts)
        ratios = np.divide(above, below, out=np.zeros(len(above)), where=below > 0)
        weights = counts[2] if self.average == "weighted" else np.ones_like(ratios)
        total = float(weights.sum())
        return {self.name: float((ratios * weights).sum()) / total if total else 0.0}


class Precision(_RatioOfClasses):
    """Of the samples that were given a class, the fraction that has it."""

    name, all_keys = "precision", ("precision",)

    def ratio(self, hits_C: Counts, found_C: Counts, true_C: Counts) -> tuple[Counts, Counts]:
        return hits_C, found_C


class Recall(_RatioOfClasses):
    """Of the samples that have a class, the fraction that was given it."""

    name, all_keys = "recall", ("recall",)

    def ratio(self, hits_C: Counts, found_C: Counts, true_C: Counts) -> tuple[Counts, Counts]:
        return hits_C, true_C


class F1(_RatioOfClasses):
    """The harmonic mean of precision and recall."""

    name, all_keys = "f1", ("f1",)

    def ratio(self, hits_C: Counts, found_C: Counts, true_C: Counts) -> tuple[Counts, Counts]:
        return 2 * hits_C, found_C + true_C


def class_labels(predictions: Any, targets: Any, name: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """One label per sample, from class labels or scores (N, C)."""
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
    if not isinstance(values, Tensor):
        return np.asarray(values)
    tensor = values.detach().cpu()
    return np.asarray(tensor.float() if tensor.is_floating_point() else tensor)


class Seqeval(Metric):
    """``accuracy`` of labels, and ``recall``, ``precision`` and ``f1`` of complete spans, over all spans (micro).

    Predictions and targets are lists of label texts for each sample, in a scheme such as IOB: ``B-name I-name O``.

    Args:
        mode, scheme: seqeval's own: ``mode="strict", scheme="IOB2"`` counts only spans that are written correctly.
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
        spans = {key: float(getattr(seqeval, f"{key}_score")(true, found, **settings)) for key in self.all_keys[1:]}
        return {"accuracy": float(seqeval.accuracy_score(true, found)), **spans}
