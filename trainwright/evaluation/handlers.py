"""A metrics handler computes named numbers from a model's outputs and the labels, exact over a complete data set.

``reset``, ``update`` for each batch, ``compute`` once: the value over all samples of all ranks, however batched.
"""

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Self  # a model's outputs and a loader's labels may be anything

import numpy as np
import torch
from torch import Tensor

from trainwright.base.batch import joined, mapped, warn_of_order
from trainwright.base.dist import all_gather_object, get_tensor_parallel_rank, get_world_size
from trainwright.base.errors import ConfigError, ConfigTypeError, UserError, nearest_name
from trainwright.base.signatures import read_signature
from trainwright.config.training.metric_config import MetricConfig
from trainwright.evaluation.evaluator import EvaluationError
from trainwright.evaluation.metrics.build_metric import (
    METRICS,
    MetricEntry,
    TorchMetric,
    as_array,
    build_metric,
    numbers_of,
    split_entry,
)
from trainwright.evaluation.metrics.metric import Metric
from trainwright.evaluation.metrics.task_inference import scores_of, shape_and_type
from trainwright.evaluation.metrics.tm_metrics import TMMetrics, put_joined_states, take_state
from trainwright.evaluation.rank_exchange import computed_over_ranks, in_data_order

logger = logging.getLogger("trainwright.evaluation")


def per_sample(values: Any) -> list[Any]:
    """One entry per sample of a tensor, an array or a list; tensors become arrays in memory."""
    values = scores_of(values) if isinstance(values, Mapping) else values
    if isinstance(values, Tensor | np.ndarray):
        return list(as_array(values))
    return [as_array(value) if isinstance(value, Tensor) else value for value in values]


def paired_rows(predictions: Any, labels: Any, handler: object) -> Iterator[tuple[Any, Any]]:
    """The rows of both, sample by sample."""
    some, others = per_sample(predictions), per_sample(labels)
    if len(some) != len(others):
        raise EvaluationError(
            f"{type(handler).__name__}: predictions {shape_and_type(predictions)} and labels {shape_and_type(labels)} "
            f"hold {len(some)} and {len(others)} samples; there must be one of each for every sample."
        )
    return zip(some, others, strict=True)


def _on_host(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value


def _joined(batches: list[Any]) -> Any:
    first = batches[0]
    if isinstance(first, tuple) and first and isinstance(first[0], Mapping):  # a dict for each sample, as in detection
        return list(chain.from_iterable(batches))
    return joined(batches)


class MetricsHandler:
    """Computes ``metrics`` of predictions and labels.

    To customize it, override one of two: ``process``, which turns a batch into a few values per sample, from which the
    metrics are then computed; or ``compute_metrics``, which is called once with the predictions and labels of the
    complete data set, joined, in memory.

    Args:
        metrics: names or ``MetricConfig`` entries among ``valid_metrics``; None: ``default_metrics``. Results are
            exact, unless an entry sets ``n_decimals``.
        trainer: provides ``trainer.model`` and ``trainer.train_dataset`` for tasks that need them.

    Raises:
        ConfigError: a metric that is not valid here, or two with results of the same name.
    """

    is_default = False  # metrics that the user did not ask for
    are_targets_probabilities = False  # as declared by the loss, see declare_targets
    shifts_labels = False  # whether a causal language model's scores come with the labels of the next tokens
    valid_metrics: Sequence[str] = ()  # none: any that `build_metric` knows
    default_metrics: Sequence[str] = ()

    def __init__(self, metrics: Iterable[MetricEntry] | MetricEntry | None = None, trainer: Any = None) -> None:
        self.trainer = trainer
        self.metrics: dict[str, Any] = {}  # a handler with its own compute_metrics may have names of its own
        is_one = isinstance(metrics, (str, Metric, Mapping, MetricConfig, TMMetrics))
        entries: Any = self.default_metrics if metrics is None else [metrics] if is_one else metrics
        for entry in entries:
            self._add(entry)
        self.reset()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self.metrics)!r})"

    def process(self, predictions: Any, labels: Any, **batch: Any) -> tuple[list[Any], list[Any]]:
        """The predictions and labels of a batch, one small value per sample, from which metrics are computed."""
        pairs = list(paired_rows(predictions, labels, self))
        return [one for one, _ in pairs], [other for _, other in pairs]

    def compute_metrics(self, predictions: Any, labels: Any, **batch: Any) -> dict[str, float]:
        """The metrics of these samples: a batch or a complete data set, as tensors, arrays or lists."""
        return self._scores(*self.process(predictions, labels, **batch))

    def reset(self) -> None:
        """Forget all batches."""
        self._batches: list[tuple[Any, Any]] = []

    def update(self, predictions: Any, labels: Any, **batch: Any) -> None:
        """Add a batch. ``batch`` are its other fields, by name."""
        if self._has_own_compute_metrics():
            self._batches.append((mapped(_on_host, predictions), mapped(_on_host, labels)))
        else:
            self._batches.append(self.process(predictions, labels, **batch))

    def compute(self) -> dict[str, float]:
        """The metrics over all samples since `reset`, of all ranks: every rank must call this.

        Raises:
            EvaluationError: there are no samples.
        """
        own = self._batches if get_tensor_parallel_rank() == 0 else []  # tensor ranks have the same batches
        return computed_over_ranks(own, self._computed)

    def _computed(self, ranks: Sequence[list[tuple[Any, Any]]]) -> dict[str, float]:
        batches = in_data_order(ranks)
        if not batches:
            raise EvaluationError(f"{type(self).__name__} has seen no samples.")
        predictions, labels = [one for one, _ in batches], [other for _, other in batches]
        if not self._has_own_compute_metrics():
            return self._scores([p for some in predictions for p in some], [t for some in labels for t in some])
        found = self.compute_metrics(_joined(predictions), _joined(labels))
        return {key: float(value) for key, value in found.items()}

    def known_results(self) -> list[str] | None:
        """The names of all results of `compute`; None if they are known only after a computation."""
        outputs = [getattr(metric, "output_keys", None) for metric in self.metrics.values()]
        if self._has_own_compute_metrics() or None in outputs:
            return None
        return [key for keys in outputs for key in keys or ()]

    def objective_of(self, key: str) -> str | None:
        """The direction of the result ``key``, "maximize" or "minimize"; None if no metric here has it."""
        found = (metric for metric in self.metrics.values() if key in getattr(metric, "output_keys", ()))
        return next((str(metric.objective) for metric in found if metric.objective), None)

    def declare_scores(self, *, are_logits: bool | None, is_classes_last: bool | None = None) -> None:
        """Declare the scores to metrics without the setting ``from_logits``: logits or probabilities.

        ``is_classes_last``: scores of several positions are (B, L, C), not (B, C, L); None: their shape shows it.
        """
        for metric in self.metrics.values():
            if isinstance(metric, TMMetrics | TorchMetric):
                metric.declare_scores(are_logits=are_logits, is_classes_last=is_classes_last)

    def declare_targets(self, *, are_probabilities: bool) -> None:
        """Declare to metrics whether targets of the shape of the scores are class probabilities."""
        self.are_targets_probabilities = are_probabilities
        for metric in self.metrics.values():
            if isinstance(metric, TMMetrics | TorchMetric):
                metric.declare_targets(are_probabilities=are_probabilities)

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

    def _add(self, entry: MetricEntry) -> None:
        name, settings = split_entry(entry)
        settings = {"n_decimals": None, **settings}
        if self.valid_metrics and name not in self.valid_metrics and not isinstance(entry, Metric):
            raise ConfigError(
                f"metrics: {type(self).__name__} has no {name!r}; it has {', '.join(self.valid_metrics)}."
                f"{nearest_name(name, self.valid_metrics)}"
            )
        if name in self.metrics:
            raise ConfigError(f"metrics: {name!r} is there twice. Leave one out.")
        try:
            metric: Any = entry if isinstance(entry, Metric) else build_metric(name, **settings)
        except ConfigError:
            if name in METRICS or not self._has_own_compute_metrics():
                raise
            metric = entry
        for key in getattr(metric, "output_keys", ()):
            for other, given in self.metrics.items():
                if key in getattr(given, "output_keys", ()):
                    raise ConfigError(
                        f"metrics: {other!r} and {name!r} both give {key!r}. Choose with output_keys, for "
                        f"example MetricConfig({name!r}, output_keys=[...])."
                    )
        self.metrics[name] = metric


_TABLES = {"confusion_matrix", "roc", "precision_recall_curve"}  # keys of metrics whose results are no numbers


class TorchMetricsHandler(MetricsHandler):
    """The handler of runs without a task: counts each batch with `TMMetrics`, and keeps only the metrics' states.

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
        self._logged: list[str] = []  # the reason for being disabled, once for this handler and its copies
        self._entries: dict[str, Any] = {}
        super().__init__(metrics, trainer)  # type: ignore[arg-type]  # a TMMetrics is an entry of this handler only

    def _add(self, entry: Any) -> None:
        metric, settings = entry, {}
        if not isinstance(entry, TMMetrics):
            name, arguments = split_entry(entry)
            settings = {key: arguments.pop(key, None) for key in ("objective", "output_keys", "n_decimals")}
            metric = TMMetrics(name, **arguments)
        if metric.key in _TABLES:
            raise ConfigError(
                f"metrics: {metric.name!r} gives a table, which a run cannot log. Name metrics that give numbers, or"
                " call TMMetrics with the outputs of Trainer.predict."
            )
        if (other := self.metrics.get(metric.key)) is not None:
            fix = "Leave one out."
            if other.arguments != metric.arguments:
                fix = (
                    "Give each a name: metrics_handler (in a config file train.evaluation.evaluator) takes a dict,"
                    f" {{'first': TorchMetricsHandler([{{'name': {metric.name!r}, ...}}]), 'second': ...}}."
                )
            raise ConfigError(f"metrics: {metric.name!r} is there twice. {fix}")
        self.metrics[metric.key], self._entries[metric.key] = metric, settings

    @property
    def ignores_label(self) -> bool:
        """Whether all metrics ignore labels of -100."""
        return all(metric.ignores_label for metric in self.metrics.values())

    @property
    def first(self) -> TMMetrics | None:
        """The first metric; None without one."""
        return next(iter(self.metrics.values()), None)

    def train_copy(self, *, all_ranks: bool = False) -> Self:
        """A new handler with the same metrics for the batches of training.

        By default it counts those of this rank only: a single rank may compute it, without waiting for the others.
        """
        alone: Self = copy.copy(self)
        alone.all_ranks, alone.metrics = all_ranks, {key: metric.fresh() for key, metric in self.metrics.items()}
        alone.reset()
        return alone

    def reset(self) -> None:
        self.is_off = False  # other data may fit
        for metric in self.metrics.values():
            metric.reset()

    def update(self, predictions: Any, labels: Any, **batch: Any) -> None:
        """Count a batch: a model's output, or the scores in it, and the targets.

        Raises:
            EvaluationError: a metric that the user requested cannot count them.
        """
        if self.is_off:
            return
        if not isinstance(predictions, Tensor):
            predictions = scores_of(predictions)
        try:  # no context manager: this runs in every step
            for metric in self.metrics.values():
                metric.update(predictions, labels)
        except UserError as error:
            self._turn_off(error)

    def compute(self) -> dict[str, float]:
        """The metrics over all samples since `reset`, exact; nothing if the handler is off.

        Raises:
            EvaluationError: there are no samples, or a metric that the user requested cannot count them.
        """
        if self.is_default:
            try:
                for metric in self.metrics.values():
                    metric.flush()  # here, where an error is raised on all ranks
            except UserError as error:
                self._turn_off(error)
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
        return {} if self.is_off else results

    def compute_metrics(self, predictions: Any, labels: Any, **batch: Any) -> dict[str, float]:
        """The metrics of these samples alone; the batches counted so far are not affected."""
        alone = self.train_copy()
        alone.update(predictions, labels)
        return alone.compute()

    def known_results(self) -> list[str] | None:
        # Some return a dictionary or a vector.
        is_plain = all(metric.gives_one_number for metric in self.metrics.values())
        return list(self.metrics) if is_plain else None

    def objective_of(self, key: str) -> str | None:
        found: str | None = None
        if key in self.metrics:
            found = self._entries[key].get("objective") or self.metrics[key].objective
        return found

    def state_dict(self) -> dict[str, Any]:
        """The counts, as tensors, numbers, texts, lists and dictionaries of these."""
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

    def _turn_off(self, error: UserError) -> None:
        if not self.is_default:
            raise error
        self.reset()
        self.is_off = True
        if not self._logged:
            self._logged.append(str(error))
            advice = " Name a metric that fits, for example metrics=['MeanSquaredError']."
            logger.info("No metric is computed: %s%s", error, "" if "MeanSquaredError" in str(error) else advice)


def _chosen(found: dict[str, float], settings: dict[str, Any]) -> dict[str, float]:
    keys, digits = settings.get("output_keys") or found, settings.get("n_decimals")
    absent = [key for key in keys if key not in found]
    if absent:
        raise EvaluationError(f"metrics: no result {absent[0]!r}; there are {', '.join(found)}.")
    return {key: found[key] if digits is None else round(found[key], digits) for key in keys}


class FunctionHandler(MetricsHandler):
    """Call ``function(predictions, labels)`` once, with all samples of the data set; it returns metrics by name.

    Raises:
        EvaluationError: it returns something other than a dict of numbers.
    """

    def __init__(self, function: Callable[[Any, Any], Mapping[str, Any]]) -> None:
        self._function = function
        _check_signature(function)
        warn_of_order("metrics_handler", function, "predictions, labels")
        super().__init__([])

    def compute_metrics(self, predictions: Any, labels: Any, **batch: Any) -> dict[str, float]:
        name = getattr(self._function, "__name__", type(self._function).__name__)
        try:
            found = self._function(predictions, labels)
        except Exception as error:
            given = {"predictions": predictions, "labels": labels}
            shown = ", ".join(f"{key}: {type(one).__name__} {shape_and_type(one)}" for key, one in given.items())
            error.add_note(f"{name} was called with the whole data set, on the CPU: {shown}.")
            raise
        if not isinstance(found, Mapping):
            raise EvaluationError(
                f"metrics_handler: {name} returned {type(found).__name__}; it must return a dict of numbers by name,"
                f" for example {{{name!r}: value}}."
            )
        try:
            return {key: float(value) for key, value in found.items()}
        except (TypeError, ValueError) as error:
            raise EvaluationError(
                f"metrics_handler: {name} returned {dict(found)!r:.200}; each value must be one number ({error})."
            ) from error


def _check_signature(function: Callable[..., Any]) -> None:
    try:
        signature = read_signature(function)
    except (TypeError, ValueError):  # not a function, or one written in C
        return
    try:
        signature.bind(None, None)
    except TypeError as error:
        name = getattr(function, "__name__", type(function).__name__)
        raise ConfigTypeError(
            f"metrics_handler: {name}{signature} is called with two positional arguments ({error}). Write def"
            f" {name if name.isidentifier() else 'compute'}(predictions, labels): both are tensors of all data."
        ) from None


class MetricObjectHandler:
    """A metric of torchmetrics, or a collection of them, which receives predictions and labels as they are.

    Results are numbers under their names, or that of the metric's class; a vector has one for each element.
    """

    def __init__(self, metric: Any) -> None:
        self.metric = metric
        self._device: torch.device | None = None

    def __repr__(self) -> str:
        return f"{type(self.metric).__name__}()"

    def reset(self) -> None:
        """Forget all batches."""
        self.metric.reset()

    def update(self, predictions: Any, labels: Any, **batch: Any) -> None:
        """Add a batch."""
        if isinstance(predictions, Tensor) and predictions.device != self._device:
            self._device = predictions.device
            self.metric.to(self._device)
        self.metric.update(predictions, labels)

    def compute(self) -> dict[str, float]:
        """The metrics over all samples since `reset`, of all ranks: every rank must call this.

        Raises:
            EvaluationError: there are no samples.
        """
        if not hasattr(self.metric, "metric_state") and not hasattr(self.metric, "keys"):
            return self._numbers(self.metric.compute())  # a class of its own, with its own exchange
        has_samples = any(one.update_count for one in self._metrics().values())
        if get_world_size() == 1 and has_samples:
            return self._numbers(self.metric.compute())
        own = take_state(self.metric) if has_samples and get_tensor_parallel_rank() == 0 else None
        return computed_over_ranks(own, self._computed)

    def _computed(self, ranks: Sequence[Any]) -> dict[str, float]:
        states = [state for state in ranks if state is not None]
        if not states:
            raise EvaluationError(f"metric {type(self.metric).__name__} has seen no samples.")
        whole = copy.deepcopy(self.metric)
        for part in whole.modules():
            if hasattr(part, "metric_state"):
                part.distributed_available_fn = lambda: False  # all ranks are here
        put_joined_states(whole, states)
        return self._numbers(whole.compute())

    def _metrics(self) -> dict[str, Any]:
        """Those of a collection, with the states that it keeps once for several; or the only one."""
        metric = self.metric
        return dict(metric.items()) if hasattr(metric, "keys") else {type(metric).__name__: metric}

    def _numbers(self, found: Any) -> dict[str, float]:
        found = found if isinstance(found, Mapping) else {type(self.metric).__name__: found}
        numbers: dict[str, float] = {}
        for name, value in found.items():
            value = torch.as_tensor(value)
            if value.numel() == 1:
                numbers[name] = float(value)
            elif value.dim() == 1:
                numbers |= {f"{name}_{place}": number for place, number in enumerate(value.tolist())}
        return numbers

    def known_results(self) -> list[str] | None:
        """The names of all results of `compute`; None if they are known only after a computation."""
        metrics = self._metrics()
        # Those of images, texts and detection may return dictionaries.
        is_plain = all(type(one).__module__.startswith(_PLAIN) for one in metrics.values())
        return [*metrics] if is_plain else None

    def objective_of(self, key: str) -> str | None:
        """The direction of the result ``key``, "maximize" or "minimize"; None if the metric does not define it."""
        is_larger = getattr(self._metrics().get(key), "higher_is_better", None)
        return None if is_larger is None else "maximize" if is_larger else "minimize"


_PLAIN = ("torchmetrics.classification.", "torchmetrics.regression.")
