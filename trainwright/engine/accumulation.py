"""Gradient accumulation: the loss of an update is the mean over the samples, or tokens, of its micro-batches.

Each micro-batch has a mean loss, which contributes its share: with equal sizes the loss divided by their number, else
weighted by samples or tokens. ``step_plan`` says which micro-batches form an update, ``step`` runs them.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainwright._torch_compat.tensor_chunks import is_dtensor
from trainwright.config.errors import ConfigError
from trainwright.data.batch import count_samples
from trainwright.engine.loss_fn import TOKENS as TOKENS
from trainwright.engine.loss_fn import sum_losses
from trainwright.events.media import wide_dtype
from trainwright.models.outputs import named_outputs, scalars_of
from trainwright.optim.named import each_optimizer
from trainwright.parallel.dist import get_data_parallel_size, reduce_over_data


def plain_backward(loss: Tensor, batch: Any = None, **options: Any) -> None:
    """``loss.backward(**options)``. ``batch`` is not used."""
    loss.backward(**options)  # type: ignore[no-untyped-call]


class HasGroups(Protocol):
    """An object with parameter groups, as optimizers have."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...


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
    """Weights the micro-batches of a window, so that their gradients add up to the gradient of one large batch.

    For each window: ``begin``, for each micro-batch ``share`` and the backward pass of its result, then ``finish``.
    With tokens the mean covers the tokens of all ranks; without, the mean of each rank has the same weight.
    """

    def __init__(
        self,
        optimizer: HasGroups,
        count: Callable[[Any], int] | None = None,
        differentiate: Callable[..., None] = plain_backward,
    ) -> None:
        """``count`` returns the samples of a batch, 0 if unknown; by default what the batch shows."""
        self._optimizer = optimizer
        self._differentiate = differentiate
        self._count = count or count_samples
        self._length = 1
        self._is_by_tokens = False
        self._num_tokens: Any = None
        self.weights: list[Any] = []  # of the window's micro-batches so far: samples, or tokens on the device

    def begin(self, length: int) -> None:
        """Start a window of ``length`` micro-batches, which form one update."""
        self._length = length
        self._is_by_tokens = False
        self.weights = []

    def continue_window(self, other: "WindowMean") -> None:
        """Continue where another one of the same run is in its window."""
        names = ("_length", "_is_by_tokens", "_num_tokens", "weights", "_total", "_is_over")
        vars(self).update({name: value for name, value in vars(other).items() if name in names})

    def loss_share(self, outputs: Any, batch: Any) -> Tensor:
        """The share of a micro-batch in the loss of the update, from the model's ``outputs``."""
        loss = sum_losses(outputs)
        return self.share(loss, batch, outputs.get(TOKENS))

    def record(self, outputs: Any) -> None:
        """Record the model's outputs for the micro-batch of the next ``backward``."""
        named = None if isinstance(outputs, Tensor) else outputs if type(outputs) is dict else named_outputs(outputs)
        self._num_tokens = None if named is None else named.get(TOKENS)

    def backward(self, loss: Tensor, batch: Any) -> None:
        """Backward pass of a micro-batch's share; the gradients are complete after the last one of the window."""
        tokens, self._num_tokens = self._num_tokens, None
        self._differentiate(self.share(loss, batch, tokens))
        if len(self.weights) == self._length:
            self.finish()

    def share(self, loss: Tensor, batch: Any, num_tokens: Any = None) -> Tensor:
        """The part of the update's loss that a micro-batch's mean loss contributes: the tensor to differentiate."""
        if num_tokens is not None:
            return self._share_by_tokens(loss, num_tokens)
        if self._length == 1:
            return loss
        weights = self.weights
        # An unknown size is assumed to equal the size of the first.
        weights.append(self._count(batch) or (weights[0] if weights else 1))
        weight, expected = weights[-1], self._length * weights[0]
        if len(weights) < self._length:
            share: Tensor = loss / (expected / weight)
            return share
        total = sum(weights)
        if total != expected:  # at an epoch's end; before the last backward, which synchronizes
            scale_gradients(self._optimizer, expected / total)
        share = loss / (total / weight)
        return share

    def share_again(self, loss: Tensor) -> Tensor:
        """The share of another loss of the last weighted micro-batch."""
        if not self.weights:
            return loss
        if self._is_by_tokens:
            return _times_tokens(loss, self.weights[-1])
        weights = self.weights
        total = self._length * weights[0] if len(weights) < self._length else sum(weights)
        share: Tensor = loss / (total / weights[-1])
        return share

    def factor(self) -> Tensor | None:
        """The factor of the gradients at the window's end, a tensor on the device; None if they need no scaling."""
        if not self._is_by_tokens:
            return None
        total = torch.stack(self.weights).sum()
        reduce_over_data(total)
        # Data parallelism divides the sum over the ranks by their number.
        return get_data_parallel_size() / total.clamp(min=1)

    def finish(self) -> None:
        """After the last micro-batch's backward pass: divide the gradients by the number of tokens of all ranks."""
        factor = self.factor()
        if factor is not None:
            scale_gradients(self._optimizer, factor)
            self._is_by_tokens = False  # scaled now

    def _share_by_tokens(self, loss: Tensor, num_tokens: Any) -> Tensor:
        tokens = _as_count(num_tokens, loss.device)
        self._is_by_tokens = True
        self.weights.append(tokens)
        return _times_tokens(loss, tokens)


class RankMean(WindowMean):
    """:class:`WindowMean` over the samples or tokens of all ranks.

    Args:
        count: the samples of this rank's batch; 0 for a padding batch, which has no effect.
        count_all: the samples of all ranks in the window that starts; 0: unknown.
    """

    def __init__(
        self,
        optimizer: HasGroups,
        differentiate: Callable[..., None],
        *,
        count: Callable[[Any], int] | None,
        count_all: Callable[[], int],
    ) -> None:
        super().__init__(optimizer, count or partial(count_samples, unknown=1), differentiate)
        self._count_all = count_all
        self._num_ranks = get_data_parallel_size()
        self._total = 0
        self._is_over = True

    def begin(self, length: int) -> None:
        super().begin(length)
        self._total, self._is_over = self._count_all(), False

    def share(self, loss: Tensor, batch: Any, num_tokens: Any = None) -> Tensor:
        if self._is_over:  # batches that a user's own loop reads
            super().begin(1)
            self._total = 0
        count = self._count(batch)
        if num_tokens is not None:
            return self._share_by_tokens(loss, num_tokens if count else 0)
        if not self._total:
            return self._share_by_tokens(loss, count)
        self.weights.append(count)
        weighted = count * self._num_ranks
        return loss if weighted == self._total else loss * (weighted / self._total)

    def share_again(self, loss: Tensor) -> Tensor:
        if self._is_by_tokens or not self._total:
            return super().share_again(loss)
        share: Tensor = loss * (self.weights[-1] * self._num_ranks / self._total)
        return share

    def finish(self) -> None:
        if self._is_by_tokens:
            super().finish()
        self._is_over = True


def weighted_mean(values: Sequence[Any], weights: Sequence[Any] = ()) -> Any:
    """The mean of the micro-batches' values, weighted if each has a weight."""
    is_by_tokens = len(weights) == len(values) and isinstance(weights[0], Tensor)
    if is_by_tokens:
        tokens = torch.stack([*weights])
        return _times_tokens(torch.stack([*values]), tokens).sum() / tokens.sum().clamp(min=1)
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
    is_even = 0 < len(weights) == len(values) and type(weights[0]) is int and len(set(weights)) == 1
    if is_even and all(type(value) is Tensor and value.device == device for value in values):
        return torch.stack([value.detach().reshape(()) for value in values]).to(wide).mean(), float(sum(weights))
    values = [value.full_tensor() if is_dtensor(value) else value for value in values]  # all processes have the same
    kept = torch.stack([torch.as_tensor(value, device=device).detach().reshape(()).to(wide) for value in values])
    if len(weights) != len(values):
        weights = [1] * len(values)
    by = torch.stack([torch.as_tensor(weight, device=device).to(wide) for weight in weights])
    return torch.stack([torch.where(by > 0, kept * by, torch.zeros_like(kept)).sum(), by.sum()])


def scale_gradients(optimizer: HasGroups, factor: float | Tensor) -> None:
    """Multiply every gradient of the optimizer's parameters; does not synchronize with the device."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                gradient = parameter.grad
                gradient.mul_(factor.to(gradient.device) if isinstance(factor, Tensor) else factor)


def _times_tokens(loss: Tensor, tokens: Tensor) -> Tensor:
    # The mean over zero tokens is NaN; it must not contribute.
    return torch.where(tokens > 0, loss * tokens, torch.zeros_like(loss))


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
