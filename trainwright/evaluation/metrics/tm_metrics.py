"""A torchmetrics metric by its name that infers the task from the first batch and is cheap to update at every step."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import groupby
from typing import Any, Self  # results of torchmetrics: numbers, tensors, dictionaries or tuples of these

import torch
from torch import Tensor

from trainwright.base.batch import IGNORED
from trainwright.base.dist import all_gather_object, get_tensor_parallel_rank, get_world_size
from trainwright.base.errors import ConfigError
from trainwright.evaluation.evaluator import EvaluationError
from trainwright.evaluation.metrics.scores import log_odds, of_second_class, ordered, probabilities, within_range
from trainwright.evaluation.metrics.task_inference import (
    Pair,
    aligned,
    check_classes,
    for_classification,
    for_regression,
    infer_task,
    is_channels_last,
    most_probable_classes,
    shape_and_type,
)
from trainwright.evaluation.metrics.torchmetrics_factory import (
    MetricFactory,
    available_names,
    key_of,
    objective_of_class,
)

logger = logging.getLogger("trainwright.evaluation")

MAX_BATCHES = 128
MAX_ELEMENTS = 1_000_000  # of predictions and targets together: 4 MB in float32
LARGE_BATCH = MAX_ELEMENTS // 16  # a batch of this size is counted at once: a copy would cost more than it saves
_BUFFERED = ("classification", "regression")  # their results do not depend on how samples are batched


class TMMetrics:
    """``TMMetrics("Accuracy")``: ``update(predictions, targets)``, ``compute()``, ``reset()``, ``to(device)``.

    Classification takes scores (B, C), probabilities or scores (B,) of the second of two classes, class indices (B,),
    or scores (B, L) of L labels, without ``task=``, ``num_classes=`` or ``num_labels=``: they are inferred from the
    first batch. Class indices alone do not determine the number of classes, so all of them are kept until ``compute``
    unless ``num_classes`` is given. Labels of -100 are ignored (``ignore_index`` changes that).

    Args:
        name: a torchmetrics class, or its name in torchmetrics 0.7 (`get_tm_avaliable_metrics`).
        buffered: count several batches with one update. The result is the same.
        from_logits: whether scores are logits or probabilities; None: as declared by the run. Undeclared ones are
            probabilities, and one outside [0, 1] is an error, for metrics that need it: not for AUROC, average
            precision and other ranks of one score, nor for the best of several classes.
        arguments: those of the torchmetrics class. A wrapper's ``base_metric`` may be a name too.

    Raises:
        ConfigError: there is no such metric, or it cannot be built with these arguments.

    Attributes:
        key: the name of the result: ``"f1_score"`` of ``F1Score``.
        objective: "maximize" or "minimize"; None if torchmetrics does not define it.
        ignores_label: whether labels of -100 are ignored.
    """

    def __init__(self, name: str, *, buffered: bool = True, from_logits: bool | None = None, **arguments: Any) -> None:
        self.name, self.arguments = name, arguments
        self.buffered, self.from_logits = buffered, from_logits
        self._are_logits = from_logits
        self._is_classes_last: bool | None = None
        self._are_targets_probabilities = False
        self._factory = MetricFactory(name, arguments)
        self.key, self.objective = key_of(name), objective_of_class(self._factory.core_class)
        self.ignores_label = self._factory.ignores_label
        # Known before it is computed: metrics of images and texts may return dictionaries.
        self.gives_one_number = not arguments and self._factory.domain in _BUFFERED
        self._may_buffer = buffered and self._factory.domain in _BUFFERED and not self._factory.is_wrapper
        self._device: torch.device | None = None  # that of the predictions, unless `to` sets another
        self._clear()
        if self._factory.missing() is None:
            self._build({})  # wrong arguments are an error now, not at the first batch

    def _clear(self) -> None:
        self._metric: Any = None
        self._inferred: dict[str, Any] | None = None  # task arguments; None until the metric is built
        self._channels_last: bool | None = None
        self._has_seen = False
        # Without a metric these are class indices of an unknown number of classes, kept until `compute`.
        self._buffer: list[Pair] = []
        self._num_elements = 0
        self._undecided: list[Pair] = []  # the first batches, if classes may lie in dimension 1 or the last

    def __repr__(self) -> str:
        arguments = "".join(f", {key}={value!r}" for key, value in self.arguments.items())
        return f"TMMetrics({self.name!r}{arguments})"

    @classmethod
    def get_tm_avaliable_metrics(cls) -> list[str]:
        """The names of the installed torchmetrics' metrics, and names of torchmetrics 0.7 that have a successor."""
        return available_names()

    @property
    def has_samples(self) -> bool:
        """Whether this rank has seen any since `reset`."""
        return self._has_seen

    def fresh(self) -> Self:
        """A new metric with the same arguments that has seen nothing."""
        found = type(self)(self.name, buffered=self.buffered, from_logits=self.from_logits, **self.arguments)
        found.declare_scores(are_logits=self._are_logits, is_classes_last=self._is_classes_last)
        found.declare_targets(are_probabilities=self._are_targets_probabilities)
        return found

    def declare_scores(self, *, are_logits: bool | None, is_classes_last: bool | None = None) -> None:
        """What scores are if the setting ``from_logits`` does not say it: logits or probabilities; None: unknown.

        ``is_classes_last``: scores of several positions are (B, L, C), not (B, C, L), where their shape fits both.
        """
        self._are_logits = are_logits if self.from_logits is None else self.from_logits
        self._is_classes_last = is_classes_last

    def declare_targets(self, *, are_probabilities: bool) -> None:
        """Whether targets of the shape of the scores are class probabilities, of which the most probable class counts.

        Without it they are those of several labels. Metrics of regression, and those with a task of labels, take
        targets as they are.
        """
        self._are_targets_probabilities = are_probabilities

    def to(self, device: torch.device | str) -> Self:
        self._device = torch.device(device)
        if self._metric is not None:
            self._metric.to(device)
        return self

    def reset(self) -> None:
        """Forget all batches and what was inferred from the first: the next ones may be of other data."""
        metric, inferred = self._metric, self._inferred
        self._clear()
        # A wrapper has memory of its own, such as the smallest result so far.
        if metric is not None and (self._factory.is_wrapper or not inferred):
            self._metric, self._inferred = metric, inferred
            metric.reset()

    def update(self, *inputs: Any, **named: Any) -> None:
        """Count a batch: predictions (B, …) and targets (B, …), or the arguments of the torchmetrics class.

        Raises:
            EvaluationError: the metric cannot take them. For a buffered batch this may be raised some batches later.
        """
        # From the second batch on, so that errors of the first are raised immediately.
        if self._may_buffer and self._has_seen and len(inputs) == 2 and not named:
            predictions, targets = inputs
            if isinstance(predictions, Tensor) and isinstance(targets, Tensor) and predictions.numel() < LARGE_BATCH:
                self._keep(predictions, targets)
                if len(self._buffer) >= MAX_BATCHES or self._num_elements >= MAX_ELEMENTS:
                    self.flush()
                return
        self.flush()
        self._count(inputs, named)

    def _keep(self, predictions: Tensor, targets: Tensor) -> None:
        # Copies, since a loader may reuse the target's memory, a captured graph writes its outputs to the same place,
        # and a slice of a large output would keep all of it in memory.
        self._buffer.append((predictions.detach().clone(), targets.detach().clone()))
        self._num_elements += predictions.numel() + targets.numel()

    def flush(self) -> None:
        """Count the buffered batches."""
        if self._metric is None:
            return
        pairs, self._buffer, self._num_elements = self._buffer, [], 0
        for pair in joined(pairs):
            self._count(pair, {})

    def compute(self, *, all_ranks: bool = True) -> Any:
        """The value over all batches since `reset`, as torchmetrics returns it: mostly a tensor of one number.

        Args:
            all_ranks: join what all ranks have counted; then every rank must call this.

        Raises:
            EvaluationError: no samples were seen.
        """
        self.flush()
        self._count_undecided()
        if all_ranks and get_world_size() > 1:
            metric = self._over_all_ranks()
        else:
            metric = self._over_indices(self._buffer) if self._has_seen and self._metric is None else self._metric
            metric = metric if self._has_seen else None
        if metric is None:
            raise EvaluationError(f"metric {self.name} has seen no samples.")
        try:
            return metric.compute()
        except (ValueError, RuntimeError, IndexError) as error:
            raise EvaluationError(f"metric {self.name}: {error}") from error

    def state_dict(self) -> dict[str, Any]:
        """Everything it has seen, as tensors, numbers, texts, lists and dictionaries of these."""
        return {
            "name": self.name,
            "inferred": self._inferred,
            "channels_last": self._channels_last,
            "are_targets_probabilities": self._are_targets_probabilities,
            "has_seen": self._has_seen,
            "buffer": {"pairs": [list(pair) for pair in self._buffer]},
            "undecided": {"pairs": [list(pair) for pair in self._undecided]},
            "metric": None if self._metric is None else take_state(self._metric),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """
        Raises:
            ConfigError: it is the state of another metric.
        """
        if state["name"] != self.name:
            raise ConfigError(f"metric {self.name}: the saved state is of {state['name']}. Name the same metric.")
        self._clear()
        self._channels_last = state["channels_last"]
        # The saved batches may be counted before the next one declares it. Older checkpoints do not have it.
        self._are_targets_probabilities = state.get("are_targets_probabilities", False)
        self._buffer = [(predictions, targets) for predictions, targets in state["buffer"]["pairs"]]
        self._num_elements = sum(value.numel() for pair in self._buffer for value in pair)
        self._undecided = [(predictions, targets) for predictions, targets in state["undecided"]["pairs"]]
        if state["inferred"] is not None:
            self._build(state["inferred"])
            put_state(self._metric, state["metric"])
        self._has_seen = state["has_seen"]

    def _build(self, inferred: dict[str, Any]) -> None:
        self._inferred = inferred
        self._metric = self._factory.build(inferred)
        if self._device is not None:
            self._metric.to(self._device)

    def _count(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        given: Pair | None = None
        with self._described(inputs), torch.no_grad():
            inputs = tuple(value.detach() if isinstance(value, Tensor) else value for value in inputs)
            if len(inputs) >= 2 and isinstance(inputs[0], Tensor) and isinstance(inputs[1], Tensor):
                given = inputs[0], inputs[1]
                inputs = (*self._converted(*given), *inputs[2:])
            elif self._metric is None:
                raise EvaluationError(f"it takes two tensors, or {self._factory.missing()}=... in advance")
            if self._metric is not None:
                if given is not None and self._is_undecided(*given):
                    self._undecided.append((given[0].clone(), given[1].clone()))
                else:
                    self._metric.update(*inputs, **named)
                if self._channels_last is not None or len(self._undecided) > MAX_BATCHES:
                    self._count_undecided()
        if self._metric is None:
            if not self._has_seen:
                self._over_indices([(inputs[0], inputs[1])], has_all=False)  # errors are raised with the first batch
            self._keep(inputs[0], inputs[1])
        self._has_seen = True

    def _is_undecided(self, predictions: Tensor, targets: Tensor) -> bool:
        """Whether classes of several positions may lie in dimension 1 or the last: later batches show it."""
        is_of_positions = predictions.dim() == targets.dim() + 1 > 2
        return self._factory.domain == "classification" and self._channels_last is None and is_of_positions

    def _count_undecided(self) -> None:
        """Count the batches whose dimension of classes was open, as the later ones, or with dimension 1."""
        pairs, self._undecided = self._undecided, []
        if pairs and self._channels_last is None:
            _warn_of_dimension(self.name, shape_and_type(pairs[0][0]))
        for pair in pairs:
            with self._described(pair), torch.no_grad():
                self._metric.update(*self._converted(*pair))

    @contextmanager
    def _described(self, inputs: tuple[Any, ...]) -> Iterator[None]:
        """Errors contain shapes and types of the inputs."""
        try:
            yield
        except ConfigError:
            raise
        except (ValueError, TypeError, RuntimeError, IndexError) as error:
            names = ["predictions", "targets", *["more"] * len(inputs)]
            got = " and ".join(f"{name} {shape_and_type(value)}" for name, value in zip(names, inputs, strict=False))
            fix = ""
            are_scores = [getattr(one, "ndim", 0) for one in inputs] == [2, 1] and inputs[0].shape[1] > 1
            if self._factory.domain == "regression" and are_scores:
                fix = " It compares numbers, one for each sample; of scores of classes use Accuracy or F1Score."
            raise EvaluationError(f"metric {self.name}: cannot count {got or 'nothing'}: {error}{fix}") from error

    def _converted(self, predictions: Tensor, targets: Tensor) -> Pair:
        """What the metric takes. The first batch of a classification builds the metric, if it determines the task."""
        domain, device = self._factory.domain, self._device or predictions.device
        # Some metrics of torchmetrics cannot take a view, such as a transposed output.
        predictions, targets = predictions.to(device).contiguous(), targets.to(device).contiguous()
        if predictions.dtype in (torch.bfloat16, torch.float16):  # of mixed precision: a softmax would be as inexact
            predictions = predictions.float()
        if domain in _BUFFERED:
            predictions, targets = aligned(predictions, targets)
        if domain == "classification":
            task = self._factory.core_arguments.get("task") or self._factory.task
            if self._are_targets_probabilities and task in (None, "multiclass"):
                targets = most_probable_classes(predictions, targets)
            if self._channels_last is None:
                found = is_channels_last(predictions, targets)
                self._channels_last = self._is_classes_last if found is None else found
            if self._metric is None and not self._has_seen:
                self._infer(predictions, targets)
        if self._metric is not None and self._metric.device != device:
            self._metric.to(device)
        if domain == "regression":
            return for_regression(predictions, targets)
        if domain != "classification":
            return predictions, targets
        given = {**self._factory.core_arguments, **(self._inferred or {})}
        task, is_last = given.get("task") or self._factory.task, bool(self._channels_last)
        scores, labels = for_classification(predictions, targets, channels_last=is_last)
        if task == "multiclass" and given.get("num_classes"):
            check_classes((scores, labels), given["num_classes"], given.get("ignore_index", IGNORED))
        has_classes = scores.dim() == labels.dim() + 1
        return self._as_read(scores, task, has_classes=has_classes) if scores.is_floating_point() else scores, labels

    def _as_read(self, scores: Tensor, task: str | None, *, has_classes: bool) -> Tensor:
        """Scores as the metric reads them, by declaration. ``has_classes``: they have a dimension of classes."""
        if task == "binary" and has_classes:
            self._check_declared(scores)
            scores = of_second_class(scores, are_logits=bool(self._are_logits))
        reads, is_multiclass = self._factory.reads(task), task == "multiclass"
        if reads == "classes":
            return scores
        if reads == "order" and not is_multiclass:
            return ordered(scores)
        if self._are_logits:
            is_order = reads == "order"
            return ordered(log_odds(scores)) if is_order else probabilities(scores, is_multiclass=is_multiclass)
        self._check_declared(scores)
        return within_range(scores)

    def _check_declared(self, scores: Tensor) -> None:
        """Check that scores that nothing declares to be logits may be probabilities."""
        if self._are_logits is None and bool(((scores < 0) | (scores > 1)).any()):
            raise ConfigError(
                f"metric {self.name}: scores lie outside [0, 1], and nothing declares that they are logits. Set"
                f" from_logits=True: metrics=[{{'name': {self.name!r}, 'from_logits': True}}], or"
                f" TMMetrics({self.name!r}, from_logits=True). (A loss of torch, a model's `loss_type` and an output"
                " 'logits' declare it, too.)"
            )

    def _infer(self, predictions: Tensor, targets: Tensor) -> None:
        task, size = infer_task(predictions, targets)
        size_name = self._factory.missing_size(self._factory.task or task)
        if size_name == "num_classes" and size is None:
            return  # class indices
        inferred: dict[str, Any] = {} if self._factory.task else {"task": task}
        if size_name is not None:
            inferred[size_name] = predictions.shape[1] if size is None else size
        self._build(inferred)

    def _over_indices(self, pairs: list[Pair], *, has_all: bool = True) -> Any:
        """The metric over class indices; the largest index gives the number of classes.

        ``has_all``: these are all samples.
        """
        converted = []
        for pair in joined(pairs):
            with self._described(pair):
                converted.append(self._converted(*pair))
                if converted[-1][0].shape != converted[-1][1].shape:
                    raise EvaluationError("predictions and targets must be class indices of one shape")
        num_classes = 1 + max(int(value.max()) for pair in converted for value in pair if value.numel())
        inferred: dict[str, Any] = {"num_classes": max(num_classes, 2)}
        if self._factory.task is None:
            is_binary = num_classes <= 2
            inferred = {"task": "binary"} if is_binary else {"task": "multiclass", **inferred}
            if is_binary and has_all and self.key != "accuracy":  # which is the same for both
                _log_binary(self.name)
        metric = self._factory.build(inferred).to(converted[-1][0].device)
        for pair in converted:
            with self._described(pair):
                metric.update(*(value.to(metric.device) for value in pair))
        return metric

    def _over_all_ranks(self) -> Any:
        """The metric over what all ranks have seen; None if none has seen anything.

        One object gather, then torchmetrics' own reductions. torchmetrics 1.9's ``sync`` gathers each tensor of a list
        state by itself, which aborts the processes if a rank has no batch (AUROC) or ranks have different numbers of
        batches (RetrievalMAP, ROUGEScore).
        """
        mine = self._inferred, None if self._metric is None else take_state(self._metric)
        indices = [(predictions.cpu(), targets.cpu()) for predictions, targets in self._buffer]
        is_counted = self._has_seen and get_tensor_parallel_rank() == 0  # tensor ranks have the same batches
        shares = [share for share in all_gather_object((*mine, indices) if is_counted else None) if share]
        if not shares:
            return None
        if kept := [pair for _, _, pairs in shares for pair in pairs]:
            return self._over_indices(kept)
        metric = self._factory.build(shares[0][0] or {})
        put_joined_states(metric, [state for _, state, _ in shares if state is not None])
        return metric


@cache  # once per process
def _log_binary(name: str) -> None:
    logger.info(
        "metric %s: all class indices are 0 or 1, so it is that of two classes. Declare more with num_classes=, or"
        " two with task='binary'.", name,
    )  # fmt: skip


@cache  # once per process
def _warn_of_dimension(name: str, scores: str) -> None:
    logger.warning(
        "metric %s: the classes of the scores %s may be in dimension 1 or the last; dimension 1 counts, as in the"
        " losses of torch. If they are in the last, transpose the scores, or declare it in the model: loss_type ="
        " 'ForTokenClassification'.", name, scores,
    )  # fmt: skip


def joined(pairs: list[Pair]) -> list[Pair]:
    """The same samples in fewer pairs: neighbors that differ only in their number of samples become one."""
    found: list[Pair] = []
    for _, group in groupby(pairs, _kind_of_pair):
        predictions, targets = map(list, zip(*group, strict=True))
        is_one = len(predictions) == 1
        found.append((predictions[0], targets[0]) if is_one else (torch.cat(predictions), torch.cat(targets)))
    return found


def _kind_of_pair(pair: Pair) -> Any:
    predictions, targets = pair
    shape, other = predictions.shape, targets.shape
    if not shape or not other or shape[0] != other[0]:
        return object()  # stays alone: joined with others, two wrong batches might seem to fit
    return shape[1:], other[1:], predictions.dtype, targets.dtype, predictions.device, targets.device


State = dict[str, dict[str, Any]]  # by the path of the metric inside its wrappers; "" is the metric itself

_PLAIN = (bool, int, float, str, type(None), Tensor)
_PRIVATE_COUNTS = ("_update_count", "_num_vals_seen")  # missing in torchmetrics' own state_dict


def take_state(metric: Any) -> State:
    """Everything that a metric and those inside it have counted, and plain attributes such as the smallest result of a
    MinMaxMetric. Tensors are copies, on the CPU."""
    return {
        path: {
            "states": {name: _copied(value) for name, value in part.metric_state.items()},
            "attributes": {
                name: _copied(value)
                for name, value in vars(part).items()
                if name not in part.metric_state
                and (not name.startswith("_") or name in _PRIVATE_COUNTS)
                and type(value) in _PLAIN
            },
        }
        for path, part in _parts(metric)
    }


def put_state(metric: Any, state: State) -> None:
    """The inverse of `take_state`, into a metric that was built with the same arguments. It stays on its device."""
    device = next(part.device for _, part in _parts(metric))
    for path, part in _parts(metric):
        for name, value in {**state[path]["states"], **state[path]["attributes"]}.items():
            setattr(part, name, _copied(value))
        part._computed = None
    metric.to(device)


def put_joined_states(metric: Any, states: Sequence[State]) -> None:
    """Put what several ranks have counted into a fresh metric, with torchmetrics' reductions."""
    put_state(metric, states[0])
    for path, part in _parts(metric) if len(states) > 1 else ():
        for name, reduction in part._reductions.items():
            values = [state[path]["states"][name] for state in states]
            if isinstance(values[0], Tensor):
                stacked = torch.stack(values)
                setattr(part, name, stacked if reduction is None else reduction(stacked))
            else:
                setattr(part, name, [item for value in values for item in value])
        part._update_count = sum(state[path]["attributes"]["_update_count"] for state in states)


def _parts(metric: Any) -> Iterator[tuple[str, Any]]:
    for path, part in metric.named_modules():
        if hasattr(part, "metric_state") and hasattr(part, "device"):  # not a collection, which has only the parts
            yield path, part


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()
    return [_copied(item) for item in value] if isinstance(value, list) else value


def show_avaliable_metrics() -> dict[str, list[str]]:
    """Print the names that `get_metric_by_name` knows, and return them by the class that implements them."""
    names = {"TMMetrics": TMMetrics.get_tm_avaliable_metrics()}
    print(names)
    return names


def get_metric_by_name(name: str, metric_impl: str = "TMMetrics", **arguments: Any) -> TMMetrics:
    """``TMMetrics(name, **arguments)``.

    Raises:
        ConfigError: ``metric_impl`` is not "TMMetrics", or there is no such metric.
    """
    if metric_impl != "TMMetrics":
        raise ConfigError(f"metric_impl: got {metric_impl!r}; it must be 'TMMetrics'.")
    return TMMetrics(name, **arguments)
