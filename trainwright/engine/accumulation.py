"""The loss of an update is the mean over the targets of all its micro-batches, on all processes.

Each micro-batch has a mean loss, which contributes its share: its part of the targets that count. ``StepPlan`` says
which micro-batches form an update, ``Step`` runs them.
"""

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from trainwright._torch_compat.tensor_chunks import is_dtensor
from trainwright.base.devices import wide_dtype
from trainwright.base.dist import start_sum_over_data
from trainwright.base.errors import ConfigError
from trainwright.data.sample_count import SampleCounter
from trainwright.engine.loss_fn import without_empty_mean
from trainwright.models.outputs import TOKENS as TOKENS
from trainwright.models.outputs import named_outputs, scalars_of
from trainwright.models.targets import TargetCounter
from trainwright.optim.named import each_optimizer
from trainwright.parallel.simulated import simulation


class AllGroups:
    """The parameter groups of several optimizers that step in one update."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizers = [optimizer]

    def add(self, optimizer: Optimizer) -> None:
        """Add an optimizer, unless it is present."""
        if not any(optimizer is one for other in self._optimizers for one in (other, *each_optimizer(other))):
            self._optimizers.append(optimizer)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        if len(self._optimizers) == 1:
            return self._optimizers[0].param_groups
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]


class WindowMean:
    """Weights the micro-batches of a window, so that their gradients add up to those of the mean over all its targets.

    For each window: ``begin``, and for each micro-batch ``share``, whose result is differentiated. The targets are
    those of all data ranks. Where they count, the window is read before its first forward pass, and the ranks sum their
    weights while it runs; where a plan knows the samples, nothing is read ahead. Only what the model itself counts, its
    ``num_tokens``, is known later: the gradients are then multiplied by ``factor`` at the window's end.

    Args:
        count: returns the samples of the batch that was read last; 0 for a padding batch. By default the rows of its
            first tensor.
        count_all: the samples of all ranks in the window that starts; 0: unknown.
        num_ranks: the data ranks that take part, whose gradients are averaged; None: this process alone.
        device: of the computation, with ``num_ranks``.
        is_staged: the model is cut into pipeline stages, and all batches of a window are read before it runs.
        has_loss: False on a stage that computes no loss.

    Attributes:
        length: the micro-batches of the window.
        weights: of the window's micro-batches so far: numbers, or tensors on the device.
        latest_samples: the samples of the latest weighted micro-batch.
        is_by_tokens: whether micro-batches weigh by the ``num_tokens`` that the model returns.
    """

    def __init__(
        self,
        *,
        targets: TargetCounter,
        count: Callable[[Any], int] | None = None,
        count_all: Callable[[], int] = lambda: 0,
        num_ranks: int | None = None,
        device: torch.device | None = None,
        is_staged: bool = False,
        has_loss: bool = True,
    ) -> None:
        self.counter = targets
        self._is_alone, self._num_ranks, self._device = num_ranks is None, num_ranks or 1, device
        self._is_staged, self._has_loss = is_staged, has_loss
        self._dtype = None if device is None else wide_dtype(device)
        # Reading one does not wait for a device.
        self._has_values = device is not None and device.type == "cpu" and simulation() is None
        self._count = count or partial(SampleCounter(None), number=None)
        self._count_all = count_all
        self.length, self._is_open = 1, False
        self._window: list[Any] = []  # the batches that are read, until they are weighed
        self._samples = deque[int]()  # of the batches that are read and not shared yet,
        self._weights = deque[Any]()  # and what they weigh
        self._sum: Any = None  # the weight of the window on all ranks
        self._exchange: Any = None  # to wait for before `_sum` is used
        self._planned: int | None = None  # the samples of the window on all ranks, if they are known
        self._outputs: Any = None
        self._num_tokens: Any = None
        self.weights: list[Any] = []
        self.latest_samples = 0
        self.is_by_tokens = False

    def begin(self, length: int, read: Callable[[], Any]) -> Callable[[], Any]:
        """Start a window of ``length`` micro-batches, which form one update; returns what gives its batches."""
        self.length, self._is_open, self._exchange, self.weights, self._window = length, True, None, [], []
        self._samples.clear()
        self._weights.clear()
        self._sum = self._planned = None
        if self.counter.targets is None:
            self._planned = self._count_all() or None
        if not self._is_staged and (
            self.is_by_tokens or (self.counter.is_decided and self._planned) or (self._is_alone and length == 1)
        ):
            self._sum = self._planned
            return read
        window = deque[Any]()
        for _ in range(length):
            window.append(read())
            self._samples.append(self._count(window[-1]))
        if self._has_loss and not self.is_by_tokens:
            self._window = [*window]
            if self.counter.is_decided:
                self._weigh()
        return window.popleft

    def _weigh(self) -> None:
        """Find what each micro-batch of the window weighs, and start to sum it over the ranks."""
        window, self._window = self._window, []
        self._weights.extend(map(self.counter.count, window, self._samples))
        if self.counter.targets is None and self._planned:
            self._sum = self._planned
        else:
            self._start_sum(self._weights)

    def _start_sum(self, weights: Collection[Any]) -> None:
        if self._num_ranks == 1:
            self._sum = sum(weights)
            return
        total, device, dtype = sum(weights), self._device, self._dtype
        # A number is written by the device: a copy could wait for it.
        is_number = not isinstance(total, Tensor)
        self._sum = torch.full((), total, dtype=dtype, device=device) if is_number else total.to(dtype)
        self._exchange = start_sum_over_data(self._sum)

    def _sum_of_ranks(self) -> Any:
        """The weight of the window on all ranks: a number, or a tensor on a device that is not the CPU."""
        if self._exchange is not None:
            self._exchange.wait()
            self._exchange = None
            if self._has_values:
                self._sum = self._sum.item()
        return self._sum

    def record(self, outputs: Any) -> None:
        """Record the model's outputs for the micro-batch of the next ``share``."""
        if not self.counter.is_decided:
            self._outputs = outputs
        named = None if isinstance(outputs, Tensor) else outputs if type(outputs) is dict else named_outputs(outputs)
        self._num_tokens = None if named is None else named.get(TOKENS)

    def share(self, loss: Tensor, batch: Any) -> Tensor:
        """The part of the update's loss that a micro-batch's mean loss contributes: the tensor to differentiate."""
        tokens, self._num_tokens = self._num_tokens, None
        if not self._is_open:  # a batch that a user's own loop reads is a window
            self.begin(1, lambda: batch)
        if tokens is None and self._is_alone and self.length == 1:
            return loss
        if self.counter.is_decided and self.is_by_tokens is (tokens is None):
            raise ConfigError(
                f"The model returns {TOKENS!r} for some batches only; in training it must return it for each, or for"
                " none."
            )
        if not self.counter.is_decided:
            self.counter.decide(self._outputs, batch)
            self._outputs = None
        self.is_by_tokens = tokens is not None
        if self._window and not self.is_by_tokens:
            self._weigh()
        samples = self.latest_samples = self._samples.popleft() if self._samples else self._count(batch)
        if tokens is not None:
            self.weights.append(_as_count(tokens if samples or self._is_alone else 0, loss.device))
            if len(self.weights) == self.length and not self._is_staged:
                self._start_sum(self.weights)  # the ranks exchange it during the last backward pass
        else:
            self.weights.append(self._weights.popleft() if self._weights else samples)
        return self.share_again(loss)

    def share_again(self, loss: Tensor) -> Tensor:
        """The share of another loss of the last weighted micro-batch."""
        if not self.weights:
            return loss
        if self.is_by_tokens:
            return _times(loss, self.weights[-1])
        # Data parallelism divides the sum over the ranks by their number.
        weight = self.weights[-1] * self._num_ranks
        total = self._sum if self._exchange is None else self._sum_of_ranks()
        is_all = type(weight) is int and weight and weight == total
        return loss if is_all else _share(loss, weight, total)

    def watch(self, model: nn.Module) -> RemovableHandle:
        """Record each output of ``model`` in training, for a loss that the user's code computes."""
        return model.register_forward_hook(lambda module, _, outputs: self.record(outputs) if module.training else None)

    def factor(self) -> float | Tensor | None:
        """The factor of the gradients at the window's end, a tensor on the device; None if they need no scaling."""
        if not self.is_by_tokens or not self.weights:
            return None
        if self._sum is None:  # on a pipeline stage
            self._start_sum(self.weights)
        total = self._sum_of_ranks()
        factor = self._num_ranks / _or_one(total)
        return None if not isinstance(factor, Tensor) and factor == 1 else factor

    def finish(self, groups: AllGroups) -> None:
        """Once after the window's last backward pass: multiply the gradients by ``factor``."""
        if self.is_by_tokens and self._is_open and (factor := self.factor()) is not None:
            scale_gradients(groups, factor)
        self._is_open = False

    def forget(self) -> None:
        """Find out again what micro-batches weigh: the loss has changed."""
        self.is_by_tokens = False
        self.counter.forget()

    def receive(self, weights: Tensor | None, *, is_by_tokens: bool) -> None:
        """The weights of the window's micro-batches, on a stage without the loss; None: their samples."""
        self.is_by_tokens = is_by_tokens
        self.weights = [*self._samples] if weights is None else [*weights.unbind()]


def _or_one(weight: Any) -> Any:
    """The weight, or 1 if it is 0."""
    return torch.where(weight > 0, weight, torch.ones_like(weight)) if isinstance(weight, Tensor) else weight or 1


def _share(loss: Tensor, weight: Any, total: Any) -> Tensor:
    """The part of a mean that has ``weight`` of ``total``. The mean over no target is NaN; it must not contribute."""
    if not (isinstance(weight, Tensor) or isinstance(total, Tensor)):
        return loss / (total / weight) if weight else _nothing(loss)
    weight = torch.as_tensor(weight, device=total.device)
    return torch.where(weight > 0, loss / (_or_one(total) / _or_one(weight)), 0.0)


def _nothing(loss: Tensor) -> Tensor:
    return without_empty_mean(loss, 0) if isinstance(loss, Tensor) else loss * 0  # the second: a factor


def _times(loss: Tensor, weight: Any) -> Tensor:
    if not isinstance(weight, Tensor):
        return loss * weight if weight else _nothing(loss)
    return torch.where(weight > 0, loss * weight, torch.zeros_like(loss))


def weighted_mean(values: Sequence[Any], weights: Sequence[Any] = ()) -> Any:
    """The mean of the micro-batches' values, weighted if each has a weight."""
    is_by_tokens = len(weights) == len(values) and isinstance(weights[0], Tensor)
    if is_by_tokens:
        tokens = torch.stack([*weights])
        return _times(torch.stack([*values]), tokens).sum() / tokens.sum().clamp(min=1)
    if weights and len(weights) == len(values) and not any(weights):  # no target counts: 0 / 0, without a gradient
        return without_empty_mean(values[0], 0) if isinstance(values[0], Tensor) else 0.0
    if len(weights) != len(values) or len(set(weights)) == 1:
        return values[0] if len(values) == 1 else sum(values) / len(values)
    total = sum(weights)
    return sum(value / (total / weight) for value, weight in zip(values, weights, strict=True) if weight)


def mean_outputs(outputs: Sequence[Mapping[str, Any]], weights: Sequence[Any] = ()) -> dict[str, Any]:
    """The scalars of an update: the mean of each over the micro-batches that have it, and the sum of tokens."""
    if len(outputs) == 1:
        return dict(outputs[0])
    rows, means = [scalars_of(one) for one in outputs], dict[str, Any]()
    for name in dict.fromkeys(chain.from_iterable(rows)):
        having = [place for place, row in enumerate(rows) if name in row]
        by = [weights[place] for place in having] if len(weights) == len(rows) else []
        device = by[0].device if by and isinstance(by[0], Tensor) else None
        column = [_detached(rows[place][name], device) for place in having]
        means[name] = sum(column) if name == TOKENS else weighted_mean(column, by)
    return means


def _detached(value: Any, device: torch.device | None) -> Any:
    """The value of a scalar; of a number a tensor on ``device``, if that is not None."""
    if isinstance(value, Tensor):
        return value.detach().reshape(())
    return value if device is None else torch.full((), value, device=device, dtype=wide_dtype(device))


def part_of_mean(values: Sequence[Any], weights: Sequence[Any], device: torch.device) -> Tensor | tuple[Tensor, float]:
    """This process's part of a mean over all processes, for ``EventStorage.put_mean``, on the device.

    Without weights all values count the same. Padding batches and means over zero tokens do not contribute, whatever
    their value. If all weights are the number 0, this process has no part.
    """
    weight = weights[0] if len(weights) == 1 else 1
    if len(values) == 1 and type(values[0]) is Tensor and type(weight) is int and weight:
        value = values[0].detach() if values[0].requires_grad else values[0]
        if value.device == device:
            copy = value.clone()  # the step may write into it later
            return copy if copy.dim() == 0 else copy.reshape(()), float(weight)
    if weights and all(type(weight) is int and not weight for weight in weights):
        return torch.zeros((), device=device), 0.0
    wide = wide_dtype(device)
    values = [value.full_tensor() if is_dtensor(value) else value for value in values]  # all processes have the same
    kept = torch.stack([torch.as_tensor(value, device=device).detach().reshape(()).to(wide) for value in values])
    if len(weights) != len(values):
        weights = [1] * len(values)
    by = torch.stack([torch.as_tensor(weight, device=device).to(wide) for weight in weights])
    return torch.stack([torch.where(by > 0, kept * by, torch.zeros_like(kept)).sum(), by.sum()])


def scale_gradients(optimizer: Optimizer | AllGroups, factor: float | Tensor) -> None:
    """Multiply every gradient of the optimizer's parameters; does not synchronize with the device."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                gradient = parameter.grad
                gradient.mul_(factor.to(gradient.device) if isinstance(factor, Tensor) else factor)


def _as_count(num_tokens: Any, device: torch.device) -> Tensor:
    if isinstance(num_tokens, Tensor):
        fault = f"has shape {tuple(num_tokens.shape)}" if num_tokens.numel() != 1 else ""
    else:
        is_count = isinstance(num_tokens, int | float) and num_tokens >= 0
        fault = "" if is_count else f"is {num_tokens!r} ({type(num_tokens).__name__})"
    if fault:
        raise ConfigError(
            f"The model's {TOKENS!r} {fault}; it must be one number >= 0: the number of tokens that the losses average."
        )
    count = torch.as_tensor(num_tokens, device=device).detach().reshape(())
    return count.to(wide_dtype(device))
