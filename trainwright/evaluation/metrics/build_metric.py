"""Metrics by name: our own, and any of torchmetrics over a complete data set."""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from trainwright.config.errors import ConfigError, did_you_mean
from trainwright.evaluation.evaluator import EvaluationError
from trainwright.evaluation.metrics.classification import F1, Accuracy, Precision, Recall, Seqeval
from trainwright.evaluation.metrics.metric import Metric
from trainwright.evaluation.metrics.texts import Bleu, CharacterErrorRate, Rouge, WordErrorRate
from trainwright.evaluation.metrics.tm_metrics import TMMetrics

METRICS: dict[str, type[Metric]] = {
    metric.name: metric
    for metric in (Accuracy, Precision, Recall, F1, Seqeval, CharacterErrorRate, WordErrorRate, Rouge, Bleu)
}


@runtime_checkable
class MetricSettings(Protocol):
    """The attributes of a ``MetricConfig`` that are read."""

    name: str
    objective: Any
    output_keys: Any
    n_decimals: Any


MetricEntry = str | MetricSettings | Metric | Mapping[str, Any]


def split_entry(entry: MetricEntry) -> tuple[str, dict[str, Any]]:
    """The name of an entry of ``metrics``, and its settings and arguments."""
    if isinstance(entry, str):
        return entry, {}
    if isinstance(entry, Mapping):
        name = entry.get("name_", entry.get("name", ""))
        return str(name), {key: value for key, value in entry.items() if key not in ("name", "name_")}
    if isinstance(entry, Metric):
        return entry.name, {}
    settings = {"objective": entry.objective, "output_keys": entry.output_keys, **getattr(entry, "arguments", {})}
    if "n_decimals" in getattr(entry, "model_fields_set", ("n_decimals",)):
        settings["n_decimals"] = entry.n_decimals
    return str(entry.name), settings


def build_metric(
    metric: str | MetricSettings | Metric,
    config: MetricSettings | Mapping[str, Any] | None = None,
    **arguments: Any,
) -> Metric:
    """``build_metric("f1", average="micro")``: a metric with ``compute(predictions, targets) -> dict[str, float]``.

    Args:
        metric: accuracy, precision, recall, f1, seqeval, cer, wer, rouge, bleu, any name that `TMMetrics` knows, a
            ``MetricConfig`` with one of these, or a metric, which is returned unchanged.
        config: the arguments of a metric that is named, as a ``MetricConfig`` or a mapping.
        arguments: ``objective``, ``output_keys``, ``n_decimals``, and those of the metric itself.

    Raises:
        ConfigError: there is no such metric, or an argument that it does not take.
    """
    if isinstance(metric, Metric):
        return metric
    name, settings = split_entry(metric)
    if isinstance(metric, str) and config is not None:
        settings = dict(config) if isinstance(config, Mapping) else split_entry(config)[1]
    arguments = {**settings, **arguments}
    own = METRICS.get(name)
    try:
        return TorchMetric(name, **arguments) if own is None else own(**arguments)
    except ConfigError as error:
        if own is None and f"torchmetrics has no {name!r}" in str(error):
            raise ConfigError(f"{error} Ours: {', '.join(METRICS)}. {nearest(name, METRICS)}".strip()) from error
        raise
    except TypeError as error:
        raise ConfigError(f"metric {name}: {error}".replace(f"{own and own.__name__}.__init__() ", "")) from error


def nearest(name: str, allowed: Any) -> str:
    """A hint, if one of the allowed names is near; else ""."""
    hint = did_you_mean(name, allowed)
    return hint if "Did you mean" in hint else ""


class TorchMetric(Metric):
    """A torchmetrics class over a complete data set. Results that are not numbers are an error."""

    def __init__(self, name: str, *, objective: str | None = None, **arguments: Any) -> None:
        settings = {key: arguments.pop(key) for key in ("output_keys", "n_decimals") if key in arguments}
        self.name = name
        self._metric = TMMetrics(name, **arguments)
        self.default_objective = self._metric.objective
        super().__init__(objective=objective, **settings)

    def values(self, predictions: Any, targets: Any) -> Mapping[str, float]:
        self._metric.reset()
        self._metric.update(_as_tensor(predictions), _as_tensor(targets))
        return numbers_of(self._metric, self._metric.compute(all_ranks=False))  # these are the data of all ranks


def numbers_of(metric: TMMetrics, value: Any) -> dict[str, float]:
    """A result as numbers by name: one by the metric's key, a vector by ``key_0, key_1 …``, a dictionary by its own.

    Raises:
        EvaluationError: it is a table or a curve.
    """
    if isinstance(value, Mapping):
        scalars = {str(k): v for k, v in value.items() if not isinstance(v, Tensor) or v.numel() == 1}
        return {key: float(item) for key, item in scalars.items()}
    found = torch.as_tensor(value) if isinstance(value, int | float | Tensor) else None
    if found is not None and found.numel() == 1:
        return {metric.key: float(found)}
    if found is not None and found.dim() == 1:
        return {f"{metric.key}_{number}": item for number, item in enumerate(found.tolist())}
    shape = f"a tensor of shape {tuple(found.shape)}" if found is not None else f"a {type(value).__name__}"
    raise EvaluationError(
        f"metric {metric.name} gives {shape}, not numbers. Name one that gives numbers, or call TMMetrics.compute."
    )


def _as_tensor(values: Any) -> Any:
    """A tensor of numbers; texts unchanged."""
    if isinstance(values, Tensor) or (len(values) and isinstance(values[0], str | Mapping)):
        return values
    if isinstance(values, list | tuple) and values and isinstance(values[0], Tensor):
        return torch.stack(list(values))
    return torch.as_tensor(np.asarray(values) if isinstance(values, list | tuple) else values)
