"""One update of the weights, settled before the first: how losses become gradients, and what is done with them."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright._torch_compat.run_backward import plain_backward
from trainwright.engine.accumulation import AllGroups, WindowMean, weighted_mean
from trainwright.engine.extra_parameters import synchronized
from trainwright.engine.gradient_sync import RankMean, Replica, SkipTogether, mean_over_ranks
from trainwright.engine.gradients import noted, recorded_norm, recorded_step, scaled_backward, scaled_step, unscaled
from trainwright.optim.clip import gradient_clipper, gradient_norm
from trainwright.optim.skip import SkipNonFinite


class Update:
    """``begin`` a window, ``backward`` each of its micro-batches, and ``finish``: clip, step, no gradients left.

    Args:
        step, zero_grad: what makes the optimizer's step, and what sets its gradients to None.
        accumulates: whether windows have more than one micro-batch.
        max_norm: to which the gradients of groups are clipped that say no norm by themselves; None: they are not.
        skip_non_finite: leave an update out whose loss or gradients are not finite.
        grad_scaler: for gradients in float16.
        count: the samples of a batch, where somebody knows better than its tensors.
        differentiate: the backward pass, where it is not torch's own.
        replica: the model of this process, where it is one of several.
        count_all: with ``replica``: the samples of all processes in the window that begins; 0: nobody knows.

    Attributes:
        begin: to be called with the length of the window that begins; None: not needed.
        finish: uses the gradients and sets them to None.
        groups: those of all optimizers that step in an update; at first the one's.
        is_prepared, is_stepping: whether ``prepare`` is done for the ``finish`` that comes, and whether it steps now.
        note: to be shown what the model returns for a batch before its ``backward``; None: not needed.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        step: Callable[[], Any],
        zero_grad: Callable[[], Any],
        *,
        accumulates: bool,
        skip_non_finite: bool,
        max_norm: float | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
        count: Callable[[Any], int] | None = None,
        differentiate: Callable[..., None] | None = None,
        replica: Replica | None = None,
        count_all: Callable[[], int] | None = None,
    ) -> None:
        self._plain_step = step
        self._zero_grad = zero_grad
        self._step: Callable[[Tensor | None], object] = lambda norm: step()
        self._prepare: Callable[[], None] = _nothing
        is_scaled, is_weighed = grad_scaler is not None, accumulates or replica is not None
        is_plain = not (is_weighed or is_scaled or differentiate)
        if replica is not None:
            self._prepare = synchronized(model, optimizer, replica.finish)
        if grad_scaler is not None:
            differentiate = differentiate or partial(scaled_backward, grad_scaler)
            self._prepare = unscaled(grad_scaler, optimizer, self._prepare)
            self._step = scaled_step(grad_scaler, optimizer)
        differentiate = differentiate or plain_backward
        self.groups = AllGroups(optimizer)
        self._mean = WindowMean(self.groups, count, differentiate)
        if replica is not None:
            self._mean = RankMean(self.groups, differentiate, count=count, count_all=count_all or _unknown)
        self.is_prepared = self.is_stepping = False
        self._device = next(model.parameters()).device if replica is not None else None
        self.record = self._mean.record if is_weighed else None
        self.begin: Callable[[int], None] | None = self._mean.begin if is_weighed else None
        self.backward: Callable[[Tensor, Any], None] = plain_backward if is_plain else self._mean.backward
        clipper = gradient_clipper(optimizer, max_norm)
        self._clip = recorded_norm(clipper, is_scaled=is_scaled)
        if skip_non_finite:
            skip = SkipNonFinite(optimizer, model.buffers(), grad_scaler=grad_scaler)
            together = skip if replica is None else SkipTogether(skip)
            self.begin, self.backward = noted(together, self.begin, self.backward)
            self._clip = recorded_norm(gradient_norm(optimizer, max_norm), is_scaled=is_scaled)
            self._step = recorded_step(skip)
        is_simple = clipper is None and replica is None and grad_scaler is None and not skip_non_finite
        self.finish: Callable[[], None] = self._finish_simply if is_simple else self._finish

    @property
    def mean(self) -> WindowMean:
        """What weighs the micro-batches of a window."""
        return self._mean

    def mean_of(self, losses: Sequence[Any]) -> Any:
        """The mean of the losses of this window's micro-batches, of all processes, by their samples or tokens."""
        if self._device is None:
            if len(losses) == 1 and not self._mean.weights:
                return losses[0]
            return weighted_mean(losses, self._mean.weights)
        return mean_over_ranks(losses, self._mean.weights, self._device)

    def _finish_simply(self) -> None:
        self._plain_step()
        self._zero_grad()

    def prepare(self) -> None:
        """Make the gradients those of all processes, not scaled; ``finish`` does so, unless it is done."""
        if not self.is_prepared:
            self.is_prepared = True
            self._prepare()

    def _finish(self) -> None:
        self.prepare()
        self.is_prepared, self.is_stepping = False, True
        self._step(self._clip())
        self._zero_grad()
        self.is_stepping = False


def _unknown() -> int:
    return 0


def _nothing(*_: object) -> None:
    """Where there is nothing to begin, or to prepare."""
