"""Whether a larger or a smaller value of a result is better."""

from collections.abc import Iterable, Mapping
from typing import Any

from trainwright.config.errors import ConfigError
from trainwright.evaluation.metrics.objective import objective_of_name

_PREFIXES = ("evaluation.", "train.")


def objective_of(key: str, handler_or_metrics: Any = None) -> str:
    """ "maximize" or "minimize": the direction of ``metric_for_best_model=key``.

    A ``MetricConfig`` of the user comes first, then the metric itself, then its name: losses, errors and distances are
    minimized; accuracies, known scores and correlations are maximized.

    Args:
        key: the name of a result, with or without ``train.`` or ``evaluation.`` before it.
        handler_or_metrics: a `MetricsHandler`, or metrics or ``MetricConfig`` entries.

    Raises:
        ConfigError: it is unknown.
    """
    objective = find_objective(key, handler_or_metrics)
    if objective is None:
        raise ConfigError(
            f"metric {key!r}: whether more of it is better is not known. Say so with an objective, for example"
            f" MetricConfig({key!r}, objective='minimize')."
        )
    return objective


def find_objective(key: str, handler_or_metrics: Any = None) -> str | None:
    """As :func:`objective_of`; None if it is unknown."""
    for prefix in _PREFIXES:
        key = key.removeprefix(prefix)
    ask = getattr(handler_or_metrics, "objective_of", None)
    if ask is not None:
        return ask(key) or objective_of_name(key)
    return _said_by(key, handler_or_metrics) or objective_of_name(key)


def objective_by_user(key: str, entries: Any) -> str | None:
    """The objective of a ``MetricConfig`` among the entries of a configuration for the result ``key``; else None."""
    return _said_by(key, entries)


def _said_by(key: str, metrics: Any) -> str | None:
    for metric in _listed(metrics):
        named = [getattr(metric, "name", None), *(getattr(metric, "output_keys", None) or ())]
        objective = getattr(metric, "objective", None)
        if key in named and objective:
            return str(objective)
    return None


def _listed(metrics: Any) -> Iterable[Any]:
    if isinstance(metrics, Mapping):
        return metrics.values()
    return metrics if isinstance(metrics, list | tuple) else [metrics]
