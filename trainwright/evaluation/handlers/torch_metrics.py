"""The handler of runs without a task: torchmetrics over what the model gave and the targets."""

import logging
from collections.abc import Iterable
from typing import Any, Self

from trainwright.config.errors import ConfigError, UserError
from trainwright.evaluation.evaluator import EvaluationError
from trainwright.evaluation.handlers.base import MetricEntry, MetricsHandler, split_entry
from trainwright.evaluation.metrics.building import numbers_of
from trainwright.evaluation.metrics.shapes import scores_of
from trainwright.evaluation.metrics.tm_metrics import TMMetrics
from trainwright.parallel.dist import all_gather_object

logger = logging.getLogger("trainwright.evaluation")


class TorchMetricsHandler(MetricsHandler):
    """Counts batches with `TMMetrics` as they come, so that nothing is kept but what the metrics keep themselves.

    Args:
        metrics: names that `TMMetrics` knows, ``MetricConfig`` entries with such names, or a `TMMetrics`; None:
            Accuracy.
        is_default: the user did not request these metrics. If they cannot process the outputs and targets, the handler
            is disabled with a log line instead of an error; ``compute`` then returns nothing.
        all_ranks: ``compute`` joins all ranks, so every rank must call it.
    """

    default_metrics = ("Accuracy",)
    shifts_labels = True

    def __init__(
        self,
        metrics: Iterable[MetricEntry] | MetricEntry | TMMetrics | None = None,
        trainer: Any = None,
        *,
        is_default: bool = False,
        all_ranks: bool = True,
    ) -> None:
        self.is_default, self.all_ranks, self.is_off = is_default, all_ranks, False
        self._has_logged = False  # the reason for being disabled
        self._entries: dict[str, Any] = {}
        given: Any = [metrics] if isinstance(metrics, TMMetrics) else metrics
        super().__init__(given, trainer)

    def _add(self, entry: Any) -> None:
        settings: dict[str, Any] = {}
        metric = entry
        if not isinstance(entry, TMMetrics):
            name, arguments = split_entry(entry)
            settings = {key: arguments.pop(key, None) for key in ("objective", "output_keys", "n_decimals")}
            metric = TMMetrics(name, **arguments)
        if metric.key in self.metrics:
            raise ConfigError(f"metrics: {metric.name!r} is there twice. Leave one out.")
        self.metrics[metric.key], self._entries[metric.key] = metric, settings

    @property
    def first(self) -> TMMetrics | None:
        """The first metric; None without one."""
        return next(iter(self.metrics.values()), None)

    def train_copy(self, *, all_ranks: bool = False) -> Self:
        """Another one for the batches that are trained on, which has seen nothing.

        By default it counts those of this rank only: it may be read on one rank alone, without waiting for the others.
        """
        copy = type(self)([], self.trainer, is_default=self.is_default, all_ranks=all_ranks)
        copy.metrics = {key: metric.fresh() for key, metric in self.metrics.items()}
        copy._entries = dict(self._entries)
        return copy

    def reset(self) -> None:
        self.is_off = False  # other data may fit
        for metric in self.metrics.values():
            metric.reset()

    def update(self, predictions: Any, labels: Any, **batch: Any) -> None:
        """Count a batch: a model's output, or the scores in it, and the targets.

        Raises:
            EvaluationError: a metric that was asked for cannot count them.
        """
        if self.is_off:
            return
        predictions = scores_of(predictions)
        try:
            for metric in self.metrics.values():
                metric.update(predictions, labels)
        except UserError as error:
            self._turn_off(error)

    def compute(self) -> dict[str, float]:
        """The metrics over all samples since `reset`, exact; nothing if the handler is off.

        Raises:
            EvaluationError: there are no samples, or a metric that was asked for cannot count them.
        """
        if self.is_default:
            self._flush()
            mine = self.is_off, any(metric.has_samples for metric in self.metrics.values())
            ranks = all_gather_object(mine) if self.all_ranks else [mine]
            if any(is_off for is_off, _ in ranks) or not any(has_samples for _, has_samples in ranks):
                return {}
        results: dict[str, float] = {}
        try:
            for key, metric in self.metrics.items():
                found = numbers_of(metric, metric.compute(all_ranks=self.all_ranks))
                results.update(_chosen(found, self._entries[key]))
        except UserError as error:
            self._turn_off(error)
            return {}
        return results

    def compute_metrics(self, predictions: Any, labels: Any, **batch: Any) -> dict[str, float]:
        """The metrics of these samples alone; what was counted so far is not touched."""
        alone = self.train_copy()
        alone.update(predictions, labels)
        return alone.compute()

    def known_results(self) -> list[str] | None:
        # Some give a dictionary or a vector.
        is_plain = all(metric.gives_one_number for metric in self.metrics.values())
        return list(self.metrics) if is_plain else None

    def objective_of(self, key: str) -> str | None:
        metric = self.metrics.get(key)
        if metric is None:
            return None
        asked = self._entries[key].get("objective")
        better = metric.higher_is_better
        return asked or (None if better is None else "maximize" if better else "minimize")

    def state_dict(self) -> dict[str, Any]:
        """What was counted, as tensors, numbers, texts, lists and dictionaries of these."""
        return {"is_off": self.is_off, "metrics": {key: m.state_dict() for key, m in self.metrics.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """
        Raises:
            ConfigError: it is the state of other metrics.
        """
        if state["metrics"].keys() != self.metrics.keys():
            raise ConfigError(
                f"metrics: the saved ones are {', '.join(state['metrics']) or 'none'}, these are "
                f"{', '.join(self.metrics) or 'none'}. Use the saved metrics to resume."
            )
        self.is_off = state["is_off"]
        for key, metric in self.metrics.items():
            metric.load_state_dict(state["metrics"][key])

    def _flush(self) -> None:
        """Process the last batches here, where an error is raised on all ranks."""
        try:
            for metric in self.metrics.values():
                metric.flush()
        except UserError as error:
            self._turn_off(error)

    def _turn_off(self, error: UserError) -> None:
        if not self.is_default:
            raise error
        self.reset()
        self.is_off = True
        if not self._has_logged:
            self._has_logged = True
            logger.info(
                "No metric is computed: %s Name a metric that fits, for example metrics=['MeanSquaredError'].", error
            )


def _chosen(found: dict[str, float], settings: dict[str, Any]) -> dict[str, float]:
    keys, digits = settings.get("output_keys") or found, settings.get("n_decimals")
    absent = [key for key in keys if key not in found]
    if absent:
        raise EvaluationError(f"metrics: no result {absent[0]!r}; there are {', '.join(found)}.")
    return {key: found[key] if digits is None else round(found[key], digits) for key in keys}
