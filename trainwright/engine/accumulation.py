"""The loss of an update is the mean over the targets of all its micro-batches, on all processes.

Each micro-batch has a mean loss, which contributes its share: its part of the targets that count. ``StepPlan`` says
which micro-batches form an update, ``Step`` runs them.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from trainwright._torch_compat.tensor_chunks import is_dtensor
from trainwright.config.errors import ConfigError
from trainwright.data.batch import count_samples
from trainwright.engine.loss_fn import TOKENS as TOKENS
from trainwright.engine.loss_fn import sum_losses, without_empty_mean
from trainwright.engine.targets import TargetCounter, Targets
from trainwright.events.media import wide_dtype
from trainwright.models.outputs import named_outputs, scalars_of
from trainwright.optim.named import each_optimizer
from trainwright.parallel.dist import start_sum_over_data
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

    For each window: ``begin``, for each micro-batch ``share`` and the backward pass of its result, then ``finish``.
    The targets are those of all data ranks. What a micro-batch weighs is its ``num_tokens``, if the model returns them,
    the targets that the :class:`TargetCounter` counts, or its samples.

    Args:
        count: returns the samples of a batch, 0 for a padding batch or if unknown; by default what the batch shows.
        count_all: of several processes: the samples of all of them in the window that starts; 0: unknown.
        num_ranks: the data ranks that take part, whose gradients are averaged; None: this process alone.
        device: of the computation; None: that of the weights.
        is_staged: the batches of a window are read, and announced by ``read``, before the first loss is known.

    Attributes:
        weights: of the window's micro-batches so far: numbers, or tensors on the device.
        latest_samples: the samples of the latest weighted micro-batch.
    """

    def __init__(
        self,
        optimizer: Optimizer | AllGroups,
        differentiate: Callable[..., None] = Tensor.backward,
        *,
        targets: TargetCounter,
        count: Callable[[Any], int] | None = None,
        count_all: Callable[[], int] | None = None,
        num_ranks: int | None = None,
        device: torch.device | None = None,
        is_staged: bool = False,
    ) -> None:
        self._optimizer, self._differentiate, self.counter = optimizer, differentiate, targets
        self._is_alone, self._num_ranks, self._is_staged = num_ranks is None, num_ranks or 1, is_staged
        self._count = count or (count_samples if num_ranks is None else partial(count_samples, unknown=1))
        self._count_all, self._device = count_all, device
        self._length, self._is_over = 1, not self._is_alone
        self._expected = 0.0  # the weight of all ranks in the window, as far as it is known before its end
        self._total: tuple[Tensor, Any] | None = None  # of all ranks, and the exchange to wait for
        self._outputs: Any = None
        self._num_tokens: Any = None
        self._is_by_tokens = False
        self._read = deque[int]()
        self._divisors: list[Any] | None = None  # on a stage without the loss, whose `weights` are those of its metrics
        self.weights: list[Any] = []
        self.latest_samples = 0
        self.is_divided_later = False  # whether `finish` divides the gradients by the weight of all ranks

    def begin(self, length: int) -> None:
        """Start a window of ``length`` micro-batches, which form one update."""
        self._length, self._is_over, self.is_divided_later, self._is_by_tokens = length, False, False, False
        self._divisors = self._total = None
        self._expected = 0 if self._is_alone or self._count_all is None else self._count_all()
        self._outputs, self.weights = None, []
        self._read.clear()

    def continue_window(self, other: "WindowMean") -> None:
        """Continue where another one of the same run is in its window."""
        names = {"_length", "_is_over", "_expected", "_num_tokens", "_is_by_tokens", "_read", "weights", "_total"}
        names.add("is_divided_later")
        vars(self).update({name: value for name, value in vars(other).items() if name in names})

    @property
    def has_weighed(self) -> bool:
        """Whether it is known by what micro-batches are weighted: their tokens, or what the first one has decided."""
        return self.counter.is_decided or bool(self.weights)

    def read(self, batch: Any) -> None:
        """Count a batch that is weighted later."""
        self._read.append(self._count(batch))

    def record(self, outputs: Any) -> None:
        """Record the model's outputs for the micro-batch of the next ``backward`` or ``share``."""
        if not self.counter.is_decided:
            self._outputs = outputs
        named = None if isinstance(outputs, Tensor) else outputs if type(outputs) is dict else named_outputs(outputs)
        self._num_tokens = None if named is None else named.get(TOKENS)

    def loss_share(self, outputs: Any, batch: Any) -> Tensor:
        """The share of a micro-batch in the loss of the update, from the model's ``outputs``."""
        loss = sum_losses(outputs)
        self.record(outputs)
        return self.share(loss, batch)

    def backward(self, loss: Tensor, batch: Any) -> None:
        """Backward pass of a micro-batch's share; the gradients are complete after the last one of the window."""
        self._differentiate(self.share(loss, batch))
        if len(self.weights) == self._length and not self._is_staged:
            self.finish()

    def share(self, loss: Tensor, batch: Any) -> Tensor:
        """The part of the update's loss that a micro-batch's mean loss contributes: the tensor to differentiate."""
        if self._is_over:  # batches that a user's own loop reads
            self._length, self._expected, self._is_over, self.weights = 1, 0, False, []
        self._total = None
        tokens, self._num_tokens = self._num_tokens, None
        if self._is_alone and self._length == 1 and tokens is None:
            return loss
        self.weights.append(self._weight(loss, batch, tokens))
        self.is_divided_later = tokens is not None or (
            not self._is_alone and (not self._expected or self.counter.targets is not None)
        )
        if len(self.weights) == self._length:
            if self.is_divided_later and not self._is_staged:
                self._start_total()  # the ranks exchange it during the last backward pass
            elif self._is_alone and not self.is_divided_later:
                self._scale_to_total()
        return self.share_again(loss)

    def _weight(self, loss: Tensor, batch: Any, tokens: Any) -> Any:
        """What a micro-batch weighs: its ``tokens``, if they are not None, its targets or its samples."""
        samples = self.latest_samples = self._read.popleft() if self._read else self._count(batch)
        if self.weights and self._is_by_tokens is (tokens is None):
            raise ConfigError(
                f"The model returns {TOKENS!r} for some micro-batches of an update only; it must return it for each, or"
                " for none."
            )
        if tokens is not None:
            self._expected, self._is_by_tokens = 0, True
            return _as_count(tokens if samples or self._is_alone else 0, loss.device)
        if not self.counter.is_decided:
            self.counter.decide(self._outputs, batch, loss, samples)
            self._outputs = None
        if self._is_alone and not samples:  # an unknown number is assumed to equal that of the first micro-batch
            first = self.weights[0] if self.weights else 1
            samples = 1 if isinstance(first, Tensor) else first or 1
        return self.counter.count(batch, samples)

    def share_again(self, loss: Tensor) -> Tensor:
        """The share of another loss of the last weighted micro-batch."""
        if not self.weights:
            return loss
        weight = self.weights[-1]
        if self._is_alone and not self.is_divided_later:
            is_known = len(self.weights) == self._length
            return _share(loss, weight, sum(self.weights) if is_known else self._length * _or_one(self.weights[0]))
        expected = self._expected_of_all()
        if not isinstance(weight, Tensor) and weight * self._num_ranks == expected:
            return loss
        return _times(loss, weight if expected == self._num_ranks else weight * self._num_ranks / expected)

    @property
    def known_targets(self) -> Targets | None:
        """Those by which the micro-batches are weighted, if they are."""
        return None if self._is_by_tokens else self.counter.targets

    def _expected_of_all(self) -> float:
        """A number near the weight of all ranks in the window, the same on all of them."""
        found = None if self._is_by_tokens else self.counter.targets  # not the property: a call in each step
        return (self._expected or self._num_ranks) * (1.0 if found is None else found.per_sample)

    def watch(self, model: nn.Module) -> RemovableHandle:
        """Record each output of ``model`` in training, for a loss that the user's code computes."""
        return model.register_forward_hook(lambda module, _, outputs: self.record(outputs) if module.training else None)

    def _scale_to_total(self) -> None:
        """The weight of the window is known now, before the last backward pass, which synchronizes."""
        expected, total = self._length * _or_one(self.weights[0]), sum(self.weights)
        if isinstance(total, Tensor):
            scale_gradients(self._optimizer, expected / _or_one(total))
        elif total not in (0, expected):
            scale_gradients(self._optimizer, expected / total)

    def _start_total(self) -> tuple[Tensor, Any]:
        weights = self.weights if self._divisors is None else self._divisors
        device = self._device or weights[0].device
        wide = wide_dtype(device)
        if len(weights) == 1 and not isinstance(weights[0], Tensor):
            total = torch.full((), weights[0], dtype=wide, device=device)
        else:
            total = torch.stack([torch.as_tensor(weight, dtype=wide, device=device) for weight in weights]).sum()
        self._total = found = total, start_sum_over_data(total) if self._num_ranks > 1 else None
        return found

    def factor(self) -> Tensor | None:
        """The factor of the gradients at the window's end, a tensor on the device; None if they need no scaling."""
        if not self.is_divided_later:
            return None
        total, exchange = self._total or self._start_total()
        if exchange is not None:
            exchange.wait()
            self._total = total, None
        # Data parallelism divides the sum over the ranks by their number.
        expected = self._expected_of_all()
        has_value = total.device.type == "cpu" and simulation() is None
        if has_value and (total.item() or 1) == expected:  # as for classes without ignored labels
            return None
        factor: Tensor = expected / _or_one(total)
        return factor

    def finish(self) -> None:
        """After the last micro-batch's backward pass: divide the gradients by the weight of all ranks."""
        if self.is_divided_later:
            factor = self.factor()
            if factor is not None:
                scale_gradients(self._optimizer, factor)
            self.is_divided_later = False  # divided now
        self._is_over = not self._is_alone

    def count_targets(self, targets: Targets, batches: Sequence[Any]) -> None:
        """On a stage without the loss: count the targets of the window's batches, as the last stage does."""
        self.counter.targets, self.counter.is_decided, self.is_divided_later = targets, True, True
        self._divisors = [self.counter.count(batch, n) for batch, n in zip(batches, self._read, strict=True)]

    def receive(self, weights: Tensor | None, *, is_by_tokens: bool) -> None:
        """The weights of the window's micro-batches, on a stage without the loss; None: their samples, or targets."""
        if self._divisors is None:
            self.is_divided_later = weights is not None or not self._expected
        if is_by_tokens:
            self._expected, self._is_by_tokens = 0, True
        self.weights = [*self._read] if weights is None else [*weights.unbind()]
        if self._divisors is not None:
            self.weights = self._divisors


def _or_one(weight: Any) -> Any:
    """The weight, or 1 if it is 0."""
    return torch.where(weight > 0, weight, torch.ones_like(weight)) if isinstance(weight, Tensor) else weight or 1


def _share(loss: Tensor, weight: Any, total: Any) -> Tensor:
    """The part of a mean that has ``weight`` of ``total``. The mean over no target is NaN; it must not contribute."""
    if not isinstance(weight, Tensor):
        return loss / (total / weight) if weight else _nothing(loss)
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
