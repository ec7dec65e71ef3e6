"""A torchmetrics metric by its name, that finds out about the task by itself and is cheap to update at every step."""

from collections.abc import Iterator, Sequence
from typing import (
    Any,  # a state is a plain dictionary
    Self,  # torchmetrics' results: numbers, tensors, dictionaries or tuples of these
)

import torch
from torch import Tensor

from trainwright.config.errors import ConfigError, UserError
from trainwright.evaluation.evaluator import EvaluationError
from trainwright.evaluation.metrics.construction import IGNORED_LABEL, SIZE_OF_TASK, Blueprint, on_device
from trainwright.evaluation.metrics.names import available_names, key_of
from trainwright.evaluation.metrics.shapes import (
    Pair,
    aligned,
    check_classes,
    for_classification,
    for_regression,
    infer_task,
    is_channels_last,
    shape_and_type,
)
from trainwright.parallel.dist import all_gather_object, get_world_size

MAX_BATCHES = 128

MAX_ELEMENTS = 1_000_000  # of predictions and targets together: 4 MB in float32

LARGE_BATCH = MAX_ELEMENTS // 16  # a batch of this size is counted at once: a copy would cost more than it saves


class Buffer:
    """Copies of predictions and targets, in order.

    Copies, since a loader may fill the same target again, a captured graph writes its outputs to the same place, and
    a slice of a large output would keep all of it in memory.
    """

    def __init__(self) -> None:
        self.clear()

    def __len__(self) -> int:
        return len(self._pairs)

    def clear(self) -> None:
        self._pairs: list[Pair] = []
        self._num_elements = 0

    def add(self, predictions: Tensor, targets: Tensor) -> bool:
        """Take one batch; whether it is time to count."""
        self._pairs.append((predictions.detach().clone(), targets.detach().clone()))
        self._num_elements += predictions.numel() + targets.numel()
        return len(self._pairs) >= MAX_BATCHES or self._num_elements >= MAX_ELEMENTS

    def take(self) -> list[Pair]:
        """What was added, as few pairs as types and shapes allow; the buffer is empty then."""
        pairs = self._pairs
        self.clear()
        return joined(pairs)

    def to(self, device: torch.device | str) -> None:
        self._pairs = [(predictions.to(device), targets.to(device)) for predictions, targets in self._pairs]

    def state_dict(self) -> dict[str, Any]:
        return {"pairs": [list(pair) for pair in self._pairs]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._pairs = [(predictions, targets) for predictions, targets in state["pairs"]]
        self._num_elements = sum(value.numel() for pair in self._pairs for value in pair)


def joined(pairs: list[Pair]) -> list[Pair]:
    """One pair of all batches if they differ only in length, else all of them. They go to the last one's device."""
    if not pairs:
        return []
    predictions, targets = map(list, zip(*pairs, strict=True))
    if len({value.device for value in (*predictions, *targets)}) > 1:
        device = predictions[-1].device
        predictions, targets = [p.to(device) for p in predictions], [t.to(device) for t in targets]
    shapes = {(p.shape, t.shape) for p, t in pairs}
    # Two lengths in one batch are an error that says so; joined with others, they might seem to fit.
    fitting = all(p and t and p[0] == t[0] for p, t in shapes) and len({(p[1:], t[1:]) for p, t in shapes}) == 1
    if not fitting or len({p.dtype for p in predictions}) > 1 or len({t.dtype for t in targets}) > 1:
        return list(zip(predictions, targets, strict=True))
    return [(torch.cat(predictions), torch.cat(targets))]


State = dict[str, dict[str, Any]]  # by the path of the metric inside its wrappers; "" is the metric itself

_PLAIN = (bool, int, float, str, type(None))

_KEPT_PRIVATE = ("_update_count", "_num_vals_seen")


def take_state(metric: Any) -> State:
    """Everything that a metric has counted. Tensors are copies, on the CPU."""
    return {
        path: {
            "states": {name: _copied(getattr(part, name)) for name in part._defaults},
            "attributes": {
                name: _copied(value)
                for name, value in vars(part).items()
                if name not in part._defaults and _is_attribute(name, value)
            },
        }
        for path, part in _parts(metric)
    }


def put_state(metric: Any, state: State) -> None:
    """The inverse of `take_state`, into a metric that was made with the same arguments. It stays on its device."""
    device = metric.device
    for path, part in _parts(metric):
        for name, value in {**state[path]["states"], **state[path]["attributes"]}.items():
            setattr(part, name, _copied(value))
        part._computed = None
    metric.to(device)


def put_joined_states(metric: Any, states: Sequence[State]) -> None:
    """Put what several ranks have counted into a fresh metric, as torchmetrics does when it joins ranks."""
    put_state(metric, states[0])
    if len(states) == 1:
        return
    for path, part in _parts(metric):
        for name, reduction in part._reductions.items():
            setattr(part, name, _joined([state[path]["states"][name] for state in states], reduction))
        part._update_count = sum(state[path]["attributes"]["_update_count"] for state in states)


def _joined(values: list[Any], reduction: Any) -> Any:
    if isinstance(values[0], Tensor):
        stacked = torch.stack(values)
        return stacked if reduction is None else reduction(stacked)
    return [item for value in values for item in value]


def _parts(metric: Any) -> Iterator[tuple[str, Any]]:
    for path, part in metric.named_modules():
        if hasattr(part, "_reductions"):
            yield path, part


def _is_attribute(name: str, value: Any) -> bool:
    """A value that a metric notes beside its states, such as the smallest result of a MinMaxMetric."""
    kept = not name.startswith("_") or name in _KEPT_PRIVATE
    return kept and type(value) in (*_PLAIN, Tensor)


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()
    return [_copied(item) for item in value] if isinstance(value, list) else value


_BUFFERED = ("classification", "regression")  # kinds whose result does not depend on how samples lie in batches


class TMMetrics:
    """``TMMetrics("Accuracy")``: ``update(predictions, targets)``, ``compute()``, ``reset()``, ``to(device)``.

    Classification takes scores (B, C), probabilities or scores (B,) of the second of two classes, class indices (B,),
    or scores (B, L) of L labels, without ``task=``, ``num_classes=`` or ``num_labels=``: they are inferred from the
    first batch. Class indices alone do not determine the number of classes, so all of them are kept until ``compute``
    unless ``num_classes`` is given. Labels of -100 are ignored (``ignore_index`` changes that).

    Args:
        name: a torchmetrics class, or its name in torchmetrics 0.7 (`get_tm_avaliable_metrics`).
        buffered: count several batches with one update. The result is the same.
        from_logits: scores are logits, whatever their values. By default, as in torchmetrics, scores of one class are
            taken for logits if any of them lies outside [0, 1].
        arguments: those of the torchmetrics class. A wrapper's ``base_metric`` may be a name too.

    Raises:
        ConfigError: there is no such metric, or it cannot be made with these arguments.
    """

    def __init__(self, name: str, *, buffered: bool = True, from_logits: bool = False, **arguments: Any) -> None:
        self.name, self.arguments = name, arguments
        self.buffered, self.from_logits = buffered, from_logits
        self._blueprint = Blueprint(name, arguments)
        self._device: torch.device | None = None  # that of the predictions, unless `to` says another
        self._buffer = Buffer()
        self._forget()
        if not self._blueprint.unknown():
            self._make({})  # wrong arguments are an error now, not at the first batch

    def _forget(self) -> None:
        self._metric: Any = None
        self._inferred: dict[str, Any] | None = None  # None until a batch was seen
        self._channels_last: bool | None = None
        self._indices: list[Pair] | None = None  # kept while the number of classes is unknown
        self._takes_pairs = False
        self._has_seen = False

    def __repr__(self) -> str:
        arguments = "".join(f", {key}={value!r}" for key, value in self.arguments.items())
        return f"TMMetrics({self.name!r}{arguments})"

    @classmethod
    def get_tm_avaliable_metrics(cls) -> list[str]:
        """The names of the installed torchmetrics' metrics, and names of torchmetrics 0.7 that have a successor."""
        return available_names()

    @property
    def key(self) -> str:
        """The name of the result: ``"f1_score"`` of ``F1Score``."""
        return key_of(self.name)

    @property
    def has_samples(self) -> bool:
        """Whether this rank has seen any since `reset`."""
        return self._has_seen or len(self._buffer) > 0

    @property
    def higher_is_better(self) -> bool | None:
        """None if torchmetrics does not say."""
        return self._blueprint.higher_is_better()

    @property
    def gives_one_number(self) -> bool:
        """Whether that is known before it is computed. Metrics of pictures and texts may give dictionaries."""
        package = self._blueprint.metric_class.__module__
        return not self.arguments and package.startswith(("torchmetrics.classification", "torchmetrics.regression"))

    def fresh(self) -> Self:
        """Another one that is made the same way and has seen nothing."""
        return type(self)(self.name, buffered=self.buffered, from_logits=self.from_logits, **self.arguments)

    def to(self, device: torch.device | str) -> Self:
        self._device = torch.device(device)
        self._buffer.to(device)
        if self._metric is not None:
            self._metric.to(device)
        return self

    def reset(self) -> None:
        """Forget all batches, and what was inferred from the first: the next ones may be of other data."""
        self._buffer.clear()
        self._has_seen = False
        if (self._inferred or self._indices is not None) and not self._blueprint.is_wrapper:
            self._metric = self._inferred = self._indices = self._channels_last = None
        if self._indices is not None:
            self._indices = []
        if self._metric is not None:
            self._metric.reset()

    def update(self, *inputs: Any, **named: Any) -> None:
        """Count a batch: predictions (B, …) and targets (B, …), or what the torchmetrics class takes.

        Raises:
            EvaluationError: the metric cannot take them. In a buffered batch this may come some batches later.
        """
        if self._takes_pairs and len(inputs) == 2 and not named:
            predictions, targets = inputs
            if isinstance(predictions, Tensor) and isinstance(targets, Tensor) and predictions.numel() < LARGE_BATCH:
                if self._buffer.add(predictions, targets):
                    self.flush()
                return
        self.flush()
        self._count(inputs, named)

    def compute(self, *, all_ranks: bool = True) -> Any:
        """The value over all batches since `reset`, as torchmetrics gives it: mostly a tensor of one number.

        Args:
            all_ranks: join what all ranks have counted; then every rank must call this.

        Raises:
            EvaluationError: no samples were seen.
        """
        self.flush()
        metric = self._joined() if all_ranks and get_world_size() > 1 else self._alone()
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
            "has_seen": self._has_seen,
            "buffer": self._buffer.state_dict(),
            "indices": None if self._indices is None else [list(pair) for pair in self._indices],
            "metric": None if self._metric is None else take_state(self._metric),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """
        Raises:
            ConfigError: it is the state of another metric.
        """
        if state["name"] != self.name:
            raise ConfigError(f"metric {self.name}: the saved state is of {state['name']}. Name the same metric.")
        self._forget()
        self._channels_last = state["channels_last"]
        self._buffer.load_state_dict(state["buffer"])
        if state["indices"] is not None:
            self._indices = [(predictions, targets) for predictions, targets in state["indices"]]
        elif state["inferred"] is not None:
            self._make(state["inferred"])
            put_state(self._metric, state["metric"])
        self._has_seen = state["has_seen"]
        self._takes_pairs = self._may_buffer()

    def _make(self, inferred: dict[str, Any]) -> None:
        self._inferred = inferred
        self._metric = self._blueprint.build(inferred)
        if self._device is not None:
            self._metric.to(self._device)

    def _may_buffer(self) -> bool:
        """Whether batches may be buffered. The first batch is not, so that its errors are raised immediately."""
        kind = self._blueprint.kind
        return self.buffered and self._has_seen and kind in _BUFFERED and not self._blueprint.is_wrapper

    def flush(self) -> None:
        """Count the batches that wait to be counted together."""
        for pair in self._buffer.take():
            self._count(pair, {})

    def _count(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        try:
            with torch.no_grad():
                inputs = tuple(value.detach() if isinstance(value, Tensor) else value for value in inputs)
                if len(inputs) >= 2 and isinstance(inputs[0], Tensor) and isinstance(inputs[1], Tensor):
                    inputs = (*self._prepared(inputs[0], inputs[1]), *inputs[2:])
                if self._metric is None and self._indices is None:
                    raise EvaluationError(
                        f"it takes two tensors, or {', '.join(self._blueprint.unknown())}=... in advance"
                    )
                if self._indices is not None:
                    self._keep(inputs[0], inputs[1])
                else:
                    self._metric.update(*inputs, **named)
        except (ValueError, TypeError, RuntimeError, IndexError) as error:
            if isinstance(error, UserError) and not isinstance(error, EvaluationError):
                raise
            raise EvaluationError(_misfit(self, inputs, error)) from error
        if not self._has_seen:
            self._has_seen = True
            self._takes_pairs = self._may_buffer()

    def _prepared(self, predictions: Tensor, targets: Tensor) -> Pair:
        kind = self._blueprint.kind
        if self._metric is not None:
            on_device(self._metric, self._device or predictions.device)
        if kind == "regression":
            return for_regression(*aligned(predictions, targets))
        if kind != "classification":
            return predictions, targets
        predictions, targets = aligned(predictions, targets)
        if self._channels_last is None:
            self._channels_last = is_channels_last(predictions, targets)
        if self._inferred is None and self._indices is None:
            self._infer(predictions, targets)
        given = {**self._blueprint.core.arguments, **(self._inferred or {})}
        task, last = given.get("task") or self._blueprint.task, bool(self._channels_last)
        pair = for_classification(predictions, targets, task, channels_last=last, from_logits=self.from_logits)
        if task == "multiclass" and given.get("num_classes"):
            check_classes(pair, given["num_classes"], given.get("ignore_index", IGNORED_LABEL))
        return pair

    def _infer(self, predictions: Tensor, targets: Tensor) -> None:
        task, size = infer_task(predictions, targets)
        unknown = self._blueprint.unknown()
        inferred: dict[str, Any] = {"task": task} if "task" in unknown else {}
        size_name = SIZE_OF_TASK.get(task) if "task" in unknown else unknown[0]
        if size_name is not None and self._blueprint.core.arguments.get(size_name) is None:
            if size is None and size_name == "num_classes":
                self._indices = []
                return
            inferred[size_name] = predictions.shape[1] if size is None else size
        self._make(inferred)
        on_device(self._metric, self._device or predictions.device)

    def _keep(self, predictions: Tensor, targets: Tensor) -> None:
        assert self._indices is not None, "asked only where class indices are kept"
        if predictions.shape != targets.shape:
            raise EvaluationError("predictions and targets must be class indices of one shape")
        if not self._has_seen:
            self._from_indices([(predictions, targets)])  # an error of torchmetrics comes with the first batch
        self._indices.append((predictions, targets))

    def _alone(self) -> Any:
        if not self._has_seen:
            return None
        return self._metric if self._indices is None else self._from_indices(self._indices)

    def _from_indices(self, pairs: list[Pair]) -> Any:
        """The metric over class indices; the largest index gives the number of classes."""
        pairs = joined(pairs)
        num_classes = 1 + max(int(value.max()) for pair in pairs for value in pair if value.numel())
        unknown = self._blueprint.unknown()
        inferred: dict[str, Any] = {"num_classes": max(num_classes, 2)}
        if "task" in unknown:
            inferred = {"task": "binary"} if num_classes <= 2 else {"task": "multiclass", **inferred}
        metric = self._blueprint.build(inferred).to(pairs[0][0].device)
        for predictions, targets in pairs:
            metric.update(predictions, targets)
        return metric

    def _joined(self) -> Any:
        """The metric over what all ranks have seen; None if none has seen anything."""
        mine: tuple[dict[str, Any] | None, State | None, list[Pair] | None] | None = None
        if self._has_seen:
            pairs = None if self._indices is None else [(p.cpu(), t.cpu()) for p, t in self._indices]
            mine = self._inferred, None if self._metric is None else take_state(self._metric), pairs
        shares = [share for share in all_gather_object(mine) if share is not None]
        if not shares:
            return None
        kept = [pair for _, _, pairs in shares for pair in pairs or ()]
        if kept:
            return self._from_indices(kept)
        metric = self._blueprint.build(shares[0][0] or {})
        put_joined_states(metric, [state for _, state, _ in shares if state is not None])
        return metric


def _misfit(metric: TMMetrics, inputs: tuple[Any, ...], error: Exception) -> str:
    names = ["predictions", "targets", *["more"] * len(inputs)]
    got = " and ".join(f"{name} {shape_and_type(value)}" for name, value in zip(names, inputs, strict=False))
    return f"metric {metric.name}: cannot count {got or 'nothing'}: {error}"


def show_avaliable_metrics() -> dict[str, list[str]]:
    """Print the names that `get_metric_by_name` knows, and give them by the class that implements them."""
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
