"""Whether higher values of a result are better: by the user's configuration, the metric, or the result's name."""

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from trainwright.base.errors import ConfigError

MODES = {"maximize": "max", "minimize": "min"}

_SMALLER = frozenset([
    "loss", "losses", "err", "error", "errors", "divergence", "deviance", "disparity", "distance",
    "perplexity", "ppl", "eed", "cer", "wer", "mer", "ter", "eer", "mae", "mse", "rmse", "msle", "mape",
])  # fmt: skip

_LARGER = frozenset([
    "acc", "accuracy", "auc", "auroc", "f1", "fbeta", "precision", "recall", "sensitivity", "specificity",
    "dice", "iou", "union", "jaccard", "map", "ndcg", "bleu", "r2", "pearson", "spearman", "corr", "correlation",
    "psnr", "ssim",
])  # fmt: skip

_LARGER_BEGINNINGS = ("rouge",)  # rouge1, rougeLsum


def objective_of_name(key: str) -> str | None:
    """ "minimize" for losses, errors and distances, "maximize" for known accuracies and scores; None if unknown.

    A class of torchmetrics is looked up last: importing it takes seconds.

    >>> objective_of_name("evaluation.loss"), objective_of_name("mean_squared_error"), objective_of_name("Acc@1")
    ('minimize', 'minimize', 'maximize')
    """
    name = re.split(r"[./]", key)[-1]
    words = re.findall(r"[a-z]+\d*", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower())
    words += [word.rstrip("0123456789") for word in words]  # acc5
    is_smaller = not _SMALLER.isdisjoint(words)
    is_larger = not _LARGER.isdisjoint(words) or any(word.startswith(_LARGER_BEGINNINGS) for word in words)
    if is_smaller != is_larger:
        return "minimize" if is_smaller else "maximize"
    return _objectives_of_torchmetrics().get(name.lower())


@cache
def _objectives_of_torchmetrics() -> dict[str, str]:
    """The objectives of the classes of torchmetrics, by the names of their results."""
    from trainwright.evaluation.metrics.torchmetrics_factory import key_of, metric_classes, objective_of_class

    known = {key_of(name): objective_of_class(kind) for name, kind in metric_classes().items()}
    return {key: objective for key, objective in known.items() if objective is not None}


def objective_of(key: str, handler_or_metrics: Any = None) -> str:
    """The objective of ``metric_for_best_model=key``: "maximize" or "minimize".

    A ``MetricConfig`` of the user has priority, then the metric itself, then its name: losses, errors and distances
    are minimized, known accuracies, scores and correlations are maximized.

    Args:
        key: the name of a result, with or without ``train.`` or ``evaluation.`` before it.
        handler_or_metrics: a `MetricsHandler`, or metrics or ``MetricConfig`` entries.

    Raises:
        ConfigError: the objective is unknown.
    """
    objective = find_objective(key, handler_or_metrics)
    if objective is None:
        raise ConfigError(
            f"metric {key!r}: it is unknown whether higher is better. Set an objective, for example"
            f" MetricConfig({key!r}, objective='minimize')."
        )
    return objective


def find_objective(key: str, handler_or_metrics: Any = None) -> str | None:
    """As :func:`objective_of`; None if the objective is unknown."""
    for prefix in ("evaluation.", "train."):
        key = key.removeprefix(prefix)
    by_handler = getattr(handler_or_metrics, "objective_of", None)
    found = objective_by_user(key, handler_or_metrics) if by_handler is None else by_handler(key)
    return found or objective_of_name(key)


def objective_by_user(key: str, metrics: Any) -> str | None:
    """The objective that metrics or ``MetricConfig`` entries have for the result ``key``; None if there is none."""
    metrics = list(metrics.values()) if isinstance(metrics, Mapping) else metrics
    for metric in metrics if isinstance(metrics, list | tuple) else [metrics]:
        keys = [getattr(metric, "name", None), *(getattr(metric, "output_keys", None) or ())]
        objective = getattr(metric, "objective", None)
        if key in keys and objective:
            return str(objective)
    return None
