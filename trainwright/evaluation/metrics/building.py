"""Metrics by name: our own, and any of torchmetrics over whole data sets."""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from trainwright.config.errors import ConfigError, did_you_mean
from trainwright.evaluation.evaluator import EvaluationError
from trainwright.evaluation.metrics.classes import F1, Accuracy, Precision, Recall
from trainwright.evaluation.metrics.metric import Metric
from trainwright.evaluation.metrics.packages import load_package
from trainwright.evaluation.metrics.texts import Bleu, CharacterErrorRate, Rouge, WordErrorRate
from trainwright.evaluation.metrics.tm_metrics import TMMetrics


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


_OWN: tuple[type[Metric], ...] = (
    Accuracy,
    Precision,
    Recall,
    F1,
    Seqeval,
    CharacterErrorRate,
    WordErrorRate,
    Rouge,
    Bleu,
)

METRICS: dict[str, type[Metric]] = {metric.name: metric for metric in _OWN}


@runtime_checkable
class MetricSettings(Protocol):
    """What is read of a ``MetricConfig``."""

    name: str
    objective: Any
    output_keys: Any
    n_decimals: Any


def build_metric(
    metric: "str | MetricSettings | Metric",
    config: "MetricSettings | Mapping[str, Any] | None" = None,
    **arguments: Any,
) -> Metric:
    """``build_metric("f1", average="micro")``: a metric with ``compute(predictions, targets) -> dict[str, float]``.

    Args:
        metric: accuracy, precision, recall, f1, seqeval, cer, wer, rouge, bleu, any name that `TMMetrics` knows, a
            ``MetricConfig`` with one of these, or a metric, which is taken as it is.
        config: the arguments of a metric that is named, as a ``MetricConfig`` or a mapping.
        arguments: ``objective``, ``output_keys``, ``n_decimals``, and those of the metric itself.

    Raises:
        ConfigError: there is no such metric, or an argument that it does not take.
    """
    if isinstance(metric, Metric):
        return metric
    if not isinstance(metric, str):
        return build_metric(metric.name, **{**_settings(metric), **arguments})
    if config is not None:
        arguments = {**(config if isinstance(config, Mapping) else _settings(config)), **arguments}
    own = METRICS.get(metric)
    try:
        return TorchMetric(metric, **arguments) if own is None else own(**arguments)
    except TypeError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"metric {metric}: {error}".replace(f"{own and own.__name__}.__init__() ", "")) from error
    except ConfigError as error:
        if own is None and f"torchmetrics has no {metric!r}" in str(error):
            raise ConfigError(f"{error} Ours: {', '.join(METRICS)}. {_nearest(metric)}".strip()) from error
        raise


def _settings(config: MetricSettings) -> dict[str, Any]:
    settings = {"objective": config.objective, "output_keys": config.output_keys, "n_decimals": config.n_decimals}
    return {**settings, **getattr(config, "arguments", {})}


def _nearest(name: str) -> str:
    hint = did_you_mean(name, METRICS)
    return hint if "Did you mean" in hint else ""


class TorchMetric(Metric):
    """A torchmetrics class over a whole data set. Results that are no numbers are refused."""

    def __init__(self, name: str, *, objective: str | None = None, **arguments: Any) -> None:
        settings = {key: arguments.pop(key) for key in ("output_keys", "n_decimals") if key in arguments}
        self.name = name
        self._metric = TMMetrics(name, **arguments)
        better = self._metric.higher_is_better
        self.default_objective = None if better is None else "maximize" if better else "minimize"
        super().__init__(objective=objective, **settings)

    def values(self, predictions: Any, targets: Any) -> Mapping[str, float]:
        self._metric.reset()
        self._metric.update(_as_tensor(predictions), _as_tensor(targets))
        # The data are all here already: there is nothing to join.
        return numbers_of(self._metric, self._metric.compute(all_ranks=False))


def numbers_of(metric: TMMetrics, value: Any) -> dict[str, float]:
    """A result as numbers by name: one by the metric's key, a vector by ``key_0, key_1 …``, a dictionary by its own.

    Raises:
        EvaluationError: it is a table or a curve.
    """
    if isinstance(value, Mapping):
        scalars = {str(k): v for k, v in value.items() if not isinstance(v, Tensor) or v.numel() == 1}
        return {key: float(item) for key, item in scalars.items()}
    found = value if isinstance(value, Tensor) else torch.as_tensor(value) if isinstance(value, int | float) else None
    if found is not None and found.numel() == 1:
        return {metric.key: float(found)}
    if found is not None and found.dim() == 1:
        return {f"{metric.key}_{number}": item for number, item in enumerate(found.tolist())}
    shape = f"a tensor of shape {tuple(found.shape)}" if found is not None else f"a {type(value).__name__}"
    raise EvaluationError(
        f"metric {metric.name} gives {shape}, not numbers. Name one that gives numbers, or call TMMetrics.compute."
    )


def _as_tensor(values: Any) -> Any:
    """A tensor of numbers; texts stay as they are."""
    if isinstance(values, Tensor) or (len(values) and isinstance(values[0], str | Mapping)):
        return values
    if isinstance(values, list | tuple) and values and isinstance(values[0], Tensor):
        return torch.stack(list(values))
    return torch.as_tensor(np.asarray(values) if isinstance(values, list | tuple) else values)
