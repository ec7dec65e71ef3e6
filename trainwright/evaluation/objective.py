"""Whether more of a result is better."""

from collections.abc import Iterable, Mapping
from typing import Any

from trainwright.evaluation.metrics.objective import objective_of_name

_PREFIXES = ("evaluation.", "train.")


def objective_of(key: str, handler_or_metrics: Any = None) -> str:
    """ "maximize" or "minimize": what ``metric_for_best_model=key`` is to look for.

    What the user has said in a ``MetricConfig`` comes first, then what the metric itself says, then its name: losses,
    errors and distances are to be small, anything else large.

    Args:
        key: the name of a result, with or without ``train.`` or ``evaluation.`` before it.
        handler_or_metrics: a `MetricsHandler`, or metrics or ``MetricConfig`` entries.
    """
    for prefix in _PREFIXES:
        key = key.removeprefix(prefix)
    ask = getattr(handler_or_metrics, "objective_of", None)
    if ask is not None:
        return ask(key) or objective_of_name(key)
    for metric in _listed(handler_or_metrics):
        named = [getattr(metric, "name", None), *(getattr(metric, "output_keys", None) or ())]
        objective = getattr(metric, "objective", None)
        if key in named and objective:
            return str(objective)
    return objective_of_name(key)


def _listed(metrics: Any) -> Iterable[Any]:
    if isinstance(metrics, Mapping):
        return metrics.values()
    return metrics if isinstance(metrics, list | tuple) else [metrics]
