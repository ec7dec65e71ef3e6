"""What an evaluation computes: the mean loss, its parts, and metrics, over the batches of all ranks.

Each metric has the protocol of torchmetrics: ``reset``, ``update`` with each batch of this rank, and ``compute`` over
all ranks, from the states that they have merged. Adapters give it to metrics handlers and to evaluators.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from trainwright.base.batch import parameter_names
from trainwright.base.dist import get_tensor_parallel_rank, is_any
from trainwright.base.errors import ConfigTypeError
from trainwright.base.signatures import shown_arguments
from trainwright.data.sample_count import SampleCounter
from trainwright.evaluation.adapters import EvaluatorHandler, MetricEvaluator, with_name
from trainwright.evaluation.comparison import Comparisons
from trainwright.evaluation.evaluator import (
    DatasetEvaluator,
    DatasetEvaluators,
    EvaluatedBatch,
    EvaluationError,
    flatten_results_dict,
    merged_results,
    single_evaluators,
)
from trainwright.evaluation.rank_exchange import EvaluatorOnRanks, computed_over_ranks
from trainwright.events.storage import find_event_storage, taken_name
from trainwright.models.outputs import losses_of, named_outputs, predictions_of, scalars_of, total_loss
from trainwright.models.targets import target_of

logger = logging.getLogger("trainwright.evaluation")

_READ = ("logits", "prediction_scores", "labels", "loss", "predictions")  # outputs that a handler gets already


class MeanLosses:
    """``loss``, the mean that a training minimizes, and the mean of each part of it that the model names."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._totals: dict[str, Tensor] = {}  # on the device, read once
        self._weights: dict[str, Tensor] = {}

    def add(self, losses: Mapping[str, Tensor], weight: int | float | Tensor) -> None:
        """Add the mean losses of a batch. ``weight``: the number of items that they average."""
        for name, loss in losses.items():
            loss = loss.detach()
            wide = loss.double() if loss.device.type != "mps" else loss
            number = torch.as_tensor(weight, device=loss.device)
            # The mean of zero items is NaN.
            share = torch.where(number > 0, wide * number, torch.zeros_like(wide))
            self._totals[name] = self._totals.get(name, 0.0) + share
            self._weights[name] = self._weights.get(name, 0) + number

    def mean(self) -> Tensor | None:
        """The mean ``loss`` of this rank so far, on its device; None before the first batch."""
        return self._totals["loss"] / self._weights["loss"] if "loss" in self._totals else None

    def sums(self) -> dict[str, tuple[float, float]]:
        """The total and the weight of each loss of this rank."""
        return {name: (float(total), float(self._weights[name])) for name, total in self._totals.items()}


def mean_losses(ranks: Sequence[Mapping[str, tuple[float, float]]]) -> dict[str, float]:
    """The means of all ranks from their ``sums``; nothing if no target counts."""
    means = {}
    for name in dict.fromkeys(name for sums in ranks for name in sums):
        totals, weights = zip(*(sums[name] for sums in ranks if name in sums), strict=True)
        if sum(weights):
            means[name] = sum(totals) / sum(weights)
    return means


def loss_of_outputs(outputs: Any) -> Tensor | None:
    """The loss that a model returns in evaluation mode; None if it returns none."""
    losses = losses_of(outputs)
    loss = None if losses is None else total_loss(losses)
    return loss.reshape(()) if isinstance(loss, Tensor) and _is_loss(loss) else None


def parts_of_loss(outputs: Any) -> dict[str, Tensor]:
    """The losses beside the entry ``loss`` that a model names, if it returns several; a single one is the total."""
    named = named_outputs(outputs) or {}
    losses = {n: v for n, v in scalars_of(named).items() if "loss" in str(n) and isinstance(v, Tensor) and _is_loss(v)}
    return {name: one.reshape(()) for name, one in losses.items() if name != "loss"} if len(losses) > 1 else {}


def _is_loss(value: Tensor) -> bool:
    return value.numel() == 1 and value.is_floating_point()


class HandlerMetric:
    """The metrics of a handler, which gets the scores and the labels of each batch as they are to be compared.

    ``name`` replaces that of a single result.
    """

    def __init__(
        self, handler: Any, comparisons: Comparisons, name: str | None = None, *, of_config_file: bool = False
    ) -> None:
        self._handler, self._comparisons, self._name = handler, comparisons, name
        self._of_config_file = of_config_file
        self._is_refusal_logged = False  # the reason for computing no metric
        self.is_complete = True  # each batch so far could be passed to the handler

    def __repr__(self) -> str:
        return type(self._handler).__name__

    def reset(self) -> None:
        self._handler.reset()
        self.is_complete = True

    def update(self, batch: EvaluatedBatch) -> None:
        """
        Raises:
            EvaluationError: there are no scores or no labels for metrics that the user asks for.
        """
        named = named_outputs(batch.outputs) or {}
        inputs = self._comparisons.labelled(batch.inputs, named)
        self._comparisons.warn_of_tokens(batch.outputs, inputs)
        comparison = self._comparisons.current(batch.outputs, inputs).for_handler(self._handler)
        predictions, labels = predictions_of(batch.outputs), target_of(inputs)
        if predictions is None:  # start_logits and end_logits
            scores = tuple(v for name, v in named.items() if str(name).endswith("_logits") and v is not None)
            predictions = scores if len(scores) > 1 else next(iter(scores), None)
        if predictions is None or labels is None:
            self.is_complete = False
            self._refuse_missing(predictions is None, inputs, named)
        elif comparison.refusal is not None:
            self.is_complete = False
            if not self._is_refusal_logged:
                self._is_refusal_logged = True
                logger.info(
                    "No accuracy is computed: %s. Set suitable metrics, for example metrics=['MeanSquaredError'], or"
                    " None.", comparison.refusal,
                )  # fmt: skip
        else:
            predictions, labels = comparison.aligned(predictions, labels)
            comparison.declare_to(self._handler)
            rest = {**(inputs if isinstance(inputs, Mapping) else {}), **named}
            fields = {k: v for k, v in rest.items() if k not in _READ}
            try:
                self._handler.update(predictions, labels, **fields)
            except TypeError as error:
                _refuse_arguments(error, self._handler, fields)
                raise

    def compute(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = {} if is_any(not self.is_complete) else self._handler.compute()
        return with_name(found, self._name)

    def _refuse_missing(self, is_without_scores: bool, inputs: Any, outputs: Mapping[str, Any]) -> None:
        """Raise where the metrics are not the default ones."""
        known = getattr(self._handler, "known_results", None)
        if getattr(self._handler, "is_default", False) or (known is not None and known() == []):
            return
        setting = "train.evaluation.evaluator" if self._of_config_file else "metrics"
        if is_without_scores:
            found = f"the model's outputs have no scores; there are {', '.join(map(str, outputs)) or 'none'}"
            fix = "Return scores as 'logits'"
            fix += "." if self._of_config_file else ", for example from evaluation_step(batch), or set metrics=None."
        else:
            has = f"the fields {', '.join(map(str, inputs))}" if isinstance(inputs, Mapping) else "no fields with names"
            found, fix = f"the batch has no labels; it has {has}", "Name the field of its labels 'labels'."
            if not self._of_config_file:
                fix = (
                    "Name the fields of its labels with label_names=[...], return 'labels' from evaluation_step(batch),"
                    " or set metrics=None."
                )
        raise EvaluationError(f"{setting}: {found}. {fix}")


def _refuse_arguments(error: TypeError, handler: Any, fields: Iterable[str]) -> None:
    """Raise an error with the line to write if a method of the handler does not take the ``fields`` of a batch."""
    for name in ("update", "process"):
        method: Any = getattr(handler, name, None)
        taken = None if method is None else parameter_names(method)
        left = [] if taken is None else [field for field in fields if field not in taken]
        if left and f"{name}() got an unexpected keyword argument" in str(error):
            own = shown_arguments(method)[1:-1]
            raise ConfigTypeError(
                f"{type(handler).__name__}.{name} is called with predictions, labels and the other fields of a batch by"
                f" name, here {', '.join(map(repr, left))}: it takes ({own}). Write def {name}(self, {own}, **batch)."
            ) from error


@dataclass(slots=True)
class OwnValues:
    """The latest values that the user's own methods return for batches, in place of metrics."""

    values: dict[str, float] = field(default_factory=dict)
    num_samples: int = 0
    is_used: bool = False


def _weighted_means(ranks: Iterable[OwnValues]) -> dict[str, float]:
    """The means of the values of all ranks by their samples; a single rank's own values are unchanged."""
    shares = [(own.values, own.num_samples) for own in ranks if own.num_samples]
    if not shares:
        return {}
    if len(shares) == 1:
        return dict(shares[0][0])
    names = [name for name in shares[0][0] if all(name in values for values, _ in shares)]
    total = sum(size for _, size in shares)
    return {name: sum(values[name] * size for values, size in shares) / total for name in names}


def _refuse_logged(logged: Mapping[str, float], results: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
    """Raise if a value that the user's code logs has the name of a result; these are given with their source."""
    for source, values in results:
        for name in logged:
            if name in values or name in flatten_results_dict(values):
                raise taken_name(name, "an evaluation", f"a result of {source}")


class EvaluationResults:
    """The mean loss and the metrics of an evaluation, over the batches of all ranks.

    A context manager around the batches of this rank: it starts without any, and ends exchanges with other ranks.

    Args:
        metrics: metrics handlers and evaluators, of which one may be several.
        comparisons: finds how to compare outputs with labels.
        count: counts the samples of the batches of this rank.
        has_loss: compute the mean loss.
        is_joint: the ranks compute each forward pass together, so one that fails cannot reach the others.
        of_config_file: errors name settings as config files do.

    Attributes:
        is_counted: whether the current batch is counted.
    """

    def __init__(
        self,
        metrics: Iterable[Any],
        comparisons: Comparisons,
        count: SampleCounter,
        *,
        has_loss: bool = True,
        is_joint: bool = False,
        of_config_file: bool = False,
    ) -> None:
        self._comparisons, self._count, self._has_loss = comparisons, count, has_loss
        self._losses, self._handlers = MeanLosses(), list[HandlerMetric]()
        self._logged: dict[str, Any] = {}  # of the current batch, by the user's code
        self._logged_means = MeanLosses()  # not those of the losses, which may have equal names
        evaluators: list[DatasetEvaluator] = []
        for given in metrics:
            metric = given.evaluator if isinstance(given, EvaluatorHandler) else given
            for one in single_evaluators(metric) if isinstance(metric, DatasetEvaluator) else [metric]:
                if isinstance(one, DatasetEvaluator) and not isinstance(one, MetricEvaluator):
                    evaluators.append(one)
                    continue
                handler, name = (one.metric, one.name) if isinstance(one, MetricEvaluator) else (one, None)
                self._handlers.append(HandlerMetric(handler, comparisons, name, of_config_file=of_config_file))
        self._exchange = EvaluatorOnRanks(DatasetEvaluators(evaluators), is_joint=is_joint)
        self._clear()  # an evaluator is reset once, when the evaluation starts

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(self, _: Any, error: BaseException | None, __: TracebackType | None) -> None:
        self._exchange.end(error)

    @property
    def exchanges_batches(self) -> bool:
        """Whether each batch is exchanged with other ranks, which end the evaluation together there, if at all."""
        return self._exchange.exchanges_batches

    def _start(self) -> None:
        self._clear()
        for handler in self._handlers:
            handler.reset()
        self._exchange.reset()
        self._comparisons.forget()

    def _clear(self) -> None:
        self._losses.reset()
        self._logged_means.reset()
        self._own = OwnValues()
        self._inputs: Any = None
        self._logged = {}
        self._num_batches = 0
        self._num_samples: int | None = 0
        self._weight: int | float | Tensor | None = None
        self.is_counted = False

    @property
    def has_metrics(self) -> bool:
        """Whether each batch so far could be passed to the metrics."""
        return not self._own.is_used and all(one.is_complete for one in self._handlers)

    @property
    def num_samples(self) -> int:
        """Those of the current batch."""
        if self._num_samples is None:
            self._num_samples = self._count(self._inputs, self._num_batches - 1)
        return self._num_samples

    def mean_loss(self) -> Tensor | None:
        """Of this rank so far, on its device; None before the first batch."""
        return self._losses.mean()

    def log(self, values: Mapping[str, Any]) -> None:
        """Log values of the current batch, or of the one that is read next: their means are among the results.

        Each is the mean over the batches of all ranks in which it is logged, weighted as the loss is. Of several values
        in one batch the latest counts.
        """
        self._logged.update(values)

    def end_batch(self) -> None:
        """Count what was logged in the current batch."""
        if self._logged and self._inputs is not None:
            weight = self.num_samples if self._weight is None else self._weight
            device = weight.device if isinstance(weight, Tensor) else None
            logged = {
                name: value if isinstance(value, Tensor) else torch.full((), value, dtype=torch.float64, device=device)
                for name, value in self._logged.items()
            }
            self._logged_means.add(logged, weight)
            self._logged = {}

    def begin_batch(self, inputs: Any) -> None:
        self._inputs, self._num_samples, self._weight, self.is_counted = inputs, None, None, False
        self._num_batches += 1

    def weigh(self, inputs: Any, outputs: Any) -> None:
        """The loss of the current batch counts by what the model and its loss declare, in place of samples."""
        inputs = self._comparisons.labelled(inputs)
        self._weight = self._comparisons.current(outputs, inputs).loss_weight(named_outputs(outputs) or {}, inputs)

    def update(self, inputs: Any, outputs: Any, loss: Tensor | None) -> None:
        """Count the current batch: what the model gets and returns, and its mean loss, if it has one."""
        self.add_loss(loss, outputs)
        batch = EvaluatedBatch(inputs, outputs, self._count.known(self._inputs, self._num_batches - 1))
        for handler in self._handlers:
            handler.update(batch)
        self._exchange.update(batch)

    def skip(self) -> None:
        """A batch of this rank whose outputs another rank adds."""
        self._logged = {}
        self._exchange.skip()

    def add_loss(self, loss: Tensor | None, outputs: Any = None) -> None:
        """Count the loss of the current batch, and its parts in ``outputs``, without its metrics."""
        self.is_counted = True
        if loss is not None and self._has_loss:
            weight = self.num_samples if self._weight is None else self._weight
            self._losses.add({"loss": loss, **parts_of_loss(outputs)}, weight)

    def use_own(self, values: Mapping[str, float]) -> None:
        """Use values of the user's own code for the current batch in place of metrics."""
        own, self.is_counted = self._own, False
        own.values |= values
        own.num_samples, own.is_used = own.num_samples + self.num_samples, True

    def compute(self) -> dict[str, Any]:
        """The results over all ranks, which must all call this."""
        if get_tensor_parallel_rank() > 0:
            self._start()  # the first of these ranks has the same
        state = self._losses.sums(), self._logged_means.sums(), self._own, self._exchange.states()
        note = f"While the attributes of {self._exchange!r} were sent to rank 0, for merge_state."
        losses, logged, own, evaluated = computed_over_ranks(state, self._computed, note=note)
        metrics: list[tuple[str, Mapping[str, Any]]]
        if own is not None:
            metrics = [("evaluate_step or compute_metric", own)]
        else:
            handled = [(repr(one), one.compute()) for one in self._handlers]
            metrics = [*handled, (repr(self._exchange), evaluated)]
        _refuse_logged(logged, [("the model (a loss)", losses), *metrics])
        if (storage := find_event_storage()) is not None:
            storage.logged_results.update(logged)
        found = merged_results(metrics)
        first = {"loss", *found}  # callbacks have names for the loss and the first metric, whatever a metric is called
        return dict(sorted((losses | found | logged).items(), key=lambda item: item[0] not in first))

    def _computed(
        self, ranks: Sequence[Any]
    ) -> tuple[dict[str, float], dict[str, float], dict[str, float] | None, dict[str, Any]]:
        """The means of losses and of logged values, the values of the user's own code, if there is such, and metrics.

        The latter are those of evaluators.
        """
        losses, logged, own, states = zip(*ranks, strict=True)
        is_own = any(one.is_used for one in own)
        metrics = {} if is_own else self._exchange.computed(states)
        return mean_losses(losses), mean_losses(logged), _weighted_means(own) if is_own else None, metrics
