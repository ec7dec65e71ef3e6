"""Gradient synchronization: wraps the model of one of several processes, so that gradients are averaged."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainwright.engine.accumulation import HasGroups, WindowMean, count_samples
from trainwright.events.media import wide_dtype
from trainwright.optim.skip import SkipNonFinite
from trainwright.parallel.data_parallel import watch_wrapped, wrap_data_parallel
from trainwright.parallel.dist import all_gather_object, get_world_size


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
        super().__init__(optimizer, count or _count_or_one, differentiate)
        self._count_all = count_all
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
        return loss * (count * get_world_size() / self._total)

    def share_again(self, loss: Tensor) -> Tensor:
        if self._is_by_tokens or not self._total:
            return super().share_again(loss)
        share: Tensor = loss * (self.weights[-1] * get_world_size() / self._total)
        return share

    def finish(self) -> None:
        super().finish()
        self._is_over = True


def _count_or_one(batch: Any) -> int:
    return count_samples(batch) or 1


def mean_over_ranks(values: Sequence[Any], weights: Sequence[Any], device: torch.device) -> Tensor:
    """The weighted mean of all ranks' values in one collective call; without weights, all values count the same.

    Does not synchronize with the device.
    """
    wide = wide_dtype(device)
    kept = torch.stack([torch.as_tensor(value, device=device).detach().reshape(()).to(wide) for value in values])
    if len(weights) != len(values):
        weights = [1] * len(values)
    by = torch.stack([torch.as_tensor(weight, device=device).to(wide) for weight in weights])
    # Padding batches and means over zero tokens do not contribute, whatever their value.
    total = torch.stack([torch.where(by > 0, kept * by, torch.zeros_like(kept)).sum(), by.sum()])
    dist.all_reduce(total)
    return total[0] / total[1].clamp(min=1)


class SkipTogether:
    """Passes losses to a :class:`SkipNonFinite` summed over the ranks, so that all ranks decide together."""

    def __init__(self, skip: SkipNonFinite) -> None:
        self.begin = skip.begin
        self._skip = skip

    def record_loss(self, loss: Tensor) -> None:
        """Record a loss of this rank. Every rank must call this."""
        loss = loss.detach().clone()
        dist.all_reduce(loss)
        self._skip.record_loss(loss)


class Replica:
    """Synchronizes gradients during the last backward pass of each update.

    The first update synchronizes after it: only then is it known whether some parameters are unused, which
    DistributedDataParallel needs to know. So does a step that has called the unwrapped model, and the first update
    after parameters were frozen or unfrozen.

    Args:
        on_wrap: called with the wrapped model whenever it changes.
        called: what to wrap: the model, or its compiled version.
        prepared: the wrapped model, if it is already wrapped.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        on_wrap: Callable[[Any], None],
        *,
        called: Any,
        prepared: Any = None,
    ) -> None:
        self._plain = model
        self._called = called
        self._device = device
        self._on_wrap = on_wrap
        self._trainable: tuple[bool, ...] | None = None
        self._wrapped: Any = None
        self._is_first = True  # the first update of these trainable parameters
        self._is_entered = False  # the wrapped model has been called for this batch
        if prepared is not None:
            watch_wrapped(prepared)
            self._trainable = self._trainable_now()
            self._use_wrapped(prepared)

    def before_batch(self, *, is_last: bool) -> None:
        """Call this before each forward pass; ``is_last``: it is the last one of the update."""
        trainable = self._trainable_now()
        if trainable != self._trainable:
            self._trainable, self._is_first = trainable, True
            self._use_wrapped(wrap_data_parallel(self._called, self._device))
        self._wrapped.require_backward_grad_sync = is_last and not self._is_first
        self._is_entered = False

    def finish(self) -> None:
        """Call this when all gradients of an update are computed, before they are used."""
        if self._is_entered and not self._is_first:
            return
        all_take_part = average_gradients(self._plain.parameters())
        if self._is_first and self._wrapped is not None:
            self._is_first = False
            self._wrapped.require_backward_grad_sync = True  # for batches without a before_batch call
            if not (all_take_part or self._wrapped.find_unused_parameters):
                self._use_wrapped(wrap_data_parallel(self._called, self._device, find_unused_parameters=True))

    def _trainable_now(self) -> tuple[bool, ...]:
        return tuple(parameter.requires_grad for parameter in self._plain.parameters())

    def _use_wrapped(self, wrapped: Any) -> None:
        self._wrapped = wrapped
        wrapped.register_forward_pre_hook(self._record_call)
        self._on_wrap(wrapped)

    def _record_call(self, module: nn.Module, arguments: Any) -> None:
        self._is_entered = True


def average_gradients(parameters: Iterable[Tensor]) -> bool:
    """Average each gradient over the ranks; a missing one counts as 0. Returns whether none was missing."""
    parameters = [parameter for parameter in parameters if parameter.requires_grad]
    there = all_gather_object([parameter.grad is not None for parameter in parameters])
    for parameter, everywhere in zip(parameters, zip(*there, strict=True), strict=True):
        if any(everywhere):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad /= get_world_size()
            dist.all_reduce(parameter.grad)
    return all(map(all, there))


def share_state(model: nn.Module, *, buffers_only: bool = False) -> None:
    """Broadcast the parameters and buffers of rank 0."""
    if get_world_size() == 1:
        return
    share_tensors([*model.buffers(), *(() if buffers_only else model.parameters())])


def share_tensors(tensors: Iterable[Tensor]) -> None:
    """Broadcast the values of rank 0."""
    for tensor in tensors:
        dist.broadcast(tensor.detach(), 0)
