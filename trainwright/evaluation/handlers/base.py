"""A metrics handler: from what a model gave and the labels to named numbers, exact over a whole data set.

``reset``, ``update`` for each batch, ``compute`` once: the value over all samples of all ranks, however batched.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any  # predictions, labels and trainers are of many kinds

from trainwright.config.errors import ConfigError, did_you_mean
from trainwright.evaluation.evaluator import EvaluationError
from trainwright.evaluation.handlers.samples import in_order, on_host, paired_rows, put_together
from trainwright.evaluation.metrics.building import METRICS, MetricSettings, build_metric
from trainwright.evaluation.metrics.metric import Metric
from trainwright.parallel.dist import all_gather_object

MetricEntry = str | MetricSettings | Metric | Mapping[str, Any]


class MetricsHandler:
    """Computes ``metrics`` of predictions and labels.

    To do it otherwise, override one of two: ``process``, which turns a batch into a few values per sample, of which the
    metrics are then computed; or ``compute_metrics``, which is called once with the predictions and labels of the whole
    data set, joined, in memory.

    Args:
        metrics: names or ``MetricConfig`` entries among ``valid_metrics``; None: ``default_metrics``. Results are
            exact, unless an entry says ``n_decimals``.
        trainer: tells what a task needs: ``trainer.model``, ``trainer.train_dataset``.

    Raises:
        ConfigError: a metric that is not valid here, or two that give results of the same name.
    """

    is_default = False  # metrics that the user did not ask for
    shifts_labels = False  # whether a causal language model's scores come with the labels of the next tokens
    valid_metrics: Sequence[str] = ()  # none: any that `build_metric` knows
    default_metrics: Sequence[str] = ()

    def __init__(self, metrics: Iterable[MetricEntry] | MetricEntry | None = None, trainer: Any = None) -> None:
        self.trainer = trainer
        self.metrics: dict[str, Any] = {}  # a handler with its own compute_metrics may have names of its own
        for entry in self._listed(metrics):
            self._add(entry)
        self._refuse_equal_keys()
        self.reset()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self.metrics)!r})"

    def process(self, predictions: Any, labels: Any, **batch: Any) -> tuple[list[Any], list[Any]]:
        """The predictions and labels of a batch, one small value per sample: what metrics are computed of."""
        pairs = list(paired_rows(predictions, labels, self))
        return [one for one, _ in pairs], [other for _, other in pairs]

    def compute_metrics(self, predictions: Any, labels: Any, **batch: Any) -> dict[str, float]:
        """The metrics of these samples: a batch or a whole data set, as tensors, arrays or lists."""
        return self._scores(*self.process(predictions, labels, **batch))

    def reset(self) -> None:
        """Forget all batches."""
        self._batches: list[tuple[Any, Any]] = []

    def update(self, predictions: Any, labels: Any, **batch: Any) -> None:
        """Take in a batch. ``batch`` are its other fields, by name."""
        if self._has_own_compute_metrics():
            self._batches.append((on_host(predictions), on_host(labels)))
        else:
            self._batches.append(self.process(predictions, labels, **batch))

    def compute(self) -> dict[str, float]:
        """The metrics over all samples since `reset`, of all ranks: every rank must call this.

        Raises:
            EvaluationError: there are no samples.
        """
        batches = in_order(all_gather_object(self._batches))
        if not batches:
            raise EvaluationError(f"{type(self).__name__} has seen no samples.")
        predictions, labels = [one for one, _ in batches], [other for _, other in batches]
        if not self._has_own_compute_metrics():
            return self._scores([p for some in predictions for p in some], [t for some in labels for t in some])
        found = self.compute_metrics(put_together(predictions), put_together(labels))
        return {key: float(value) for key, value in found.items()}

    def known_results(self) -> list[str] | None:
        """The names of all results that `compute` can give; None where only a computation can tell."""
        outputs = [getattr(metric, "output_keys", None) for metric in self.metrics.values()]
        if self._has_own_compute_metrics() or None in outputs:
            return None
        return [key for keys in outputs for key in keys or ()]

    def objective_of(self, key: str) -> str | None:
        """What is better of the result ``key``, "maximize" or "minimize"; None if no metric here gives it."""
        found = (metric for metric in self.metrics.values() if key in getattr(metric, "output_keys", ()))
        return next((str(metric.objective) for metric in found if metric.objective), None)

    def _scores(self, predictions: list[Any], labels: list[Any]) -> dict[str, float]:
        results: dict[str, float] = {}
        for metric in self.metrics.values():
            results.update(metric.compute(predictions, labels))
        return results

    def _has_own_compute_metrics(self) -> bool:
        """Whether a subclass overrides ``compute_metrics``, and none below it ``process``."""
        owners = [
            next(place for place, kind in enumerate(type(self).__mro__) if name in vars(kind))
            for name in ("compute_metrics", "process")
        ]
        return type(self).__mro__[owners[0]] is not MetricsHandler and owners[0] <= owners[1]

    def _listed(self, metrics: Iterable[MetricEntry] | MetricEntry | None) -> list[Any]:
        if metrics is None:
            return list(self.default_metrics)
        is_one = isinstance(metrics, (str, Metric, Mapping, MetricSettings))
        return [metrics] if is_one else list(metrics)  # type: ignore[arg-type]  # what is left is iterable

    def _add(self, entry: MetricEntry) -> None:
        name, settings = split_entry(entry)
        if self.valid_metrics and name not in self.valid_metrics and not isinstance(entry, Metric):
            raise ConfigError(
                f"metrics: {type(self).__name__} has no {name!r}; it has {', '.join(self.valid_metrics)}. "
                f"{_nearest(name, self.valid_metrics)}".strip()
            )
        if name in self.metrics:
            raise ConfigError(f"metrics: {name!r} is there twice. Leave one out.")
        try:
            self.metrics[name] = entry if isinstance(entry, Metric) else build_metric(name, **settings)
        except ConfigError:
            if name in METRICS or not self._has_own_compute_metrics():
                raise
            self.metrics[name] = entry

    def _refuse_equal_keys(self) -> None:
        origin: dict[str, str] = {}
        for name, metric in self.metrics.items():
            for key in getattr(metric, "output_keys", ()):
                if key in origin:
                    raise ConfigError(
                        f"metrics: {origin[key]!r} and {name!r} both give {key!r}. Choose with output_keys, for "
                        f"example MetricConfig({name!r}, output_keys=[...])."
                    )
                origin[key] = name


def split_entry(entry: Any) -> tuple[str, dict[str, Any]]:
    """The name of an entry of ``metrics``, and its settings: exact values, unless the entry says how many decimals."""
    if isinstance(entry, Mapping):
        settings = {key: value for key, value in entry.items() if key not in ("name", "name_")}
        return str(entry.get("name_", entry.get("name", ""))), {"n_decimals": None, **settings}
    if isinstance(entry, str):
        return entry, {"n_decimals": None}
    if isinstance(entry, Metric):
        return entry.name, {}
    is_set = "n_decimals" in getattr(entry, "model_fields_set", ("n_decimals",))
    settings = {"objective": entry.objective, "output_keys": entry.output_keys}
    arguments = getattr(entry, "arguments", {})
    return str(entry.name), {**settings, "n_decimals": entry.n_decimals if is_set else None, **arguments}


def _nearest(name: str, allowed: Sequence[str]) -> str:
    hint = did_you_mean(name, allowed)
    return hint if "Did you mean" in hint else ""
