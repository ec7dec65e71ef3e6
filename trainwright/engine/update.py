"""One update of the weights, composed before the first step: how losses become gradients, and how these are used."""

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
from trainwright.engine.gradients import (
    record_for_skip,
    recorded_norm,
    recorded_step,
    scaled_backward,
    scaled_step,
    unscaled,
)
from trainwright.optim.clip import gradient_clipper, gradient_norm
from trainwright.optim.skip import SkipNonFinite


class Update:
    """``begin`` a window, ``backward`` for each micro-batch, and ``finish``: clip, step, set gradients to None.

    Args:
        step, zero_grad: the calls that step the optimizer and set its gradients to None.
        accumulates: whether windows have more than one micro-batch.
        max_norm: the clipping norm of groups that set none themselves; None: no clipping.
        skip_non_finite: skip updates whose loss or gradients are not finite.
        grad_scaler: the gradient scaler of float16.
        count: the number of samples of a batch, if it is not the size of its tensors.
        differentiate: the backward pass, if it is not torch's own.
        replica: the model of this process, if there are several processes.
        count_all: with ``replica``: the samples of all processes in the window that starts; 0: unknown.

    Attributes:
        begin: called with the length of the window that starts; None: not needed.
        finish: uses the gradients and sets them to None.
        groups: the parameter groups of all optimizers that step in an update.
        is_prepared, is_stepping: whether ``prepare`` has run for the next ``finish``, and whether ``finish`` runs.
        record: called with the model's outputs for a batch before its ``backward``; None: not needed.
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
        self._grad_scaler = grad_scaler
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
            self.begin, self.backward = record_for_skip(together, self.begin, self.backward)
            self._clip = recorded_norm(gradient_norm(optimizer, max_norm), is_scaled=is_scaled)
            self._step = recorded_step(skip)
        is_simple = clipper is None and replica is None and grad_scaler is None and not skip_non_finite
        self.finish: Callable[[], None] = self._finish_simply if is_simple else self._finish

    @property
    def mean(self) -> WindowMean:
        """Weights the micro-batches of a window."""
        return self._mean

    def mean_of(self, losses: Sequence[Any]) -> Any:
        """The mean of this window's losses over its micro-batches and all processes, weighted by samples or tokens."""
        if self._device is None:
            if len(losses) == 1 and not self._mean.weights:
                return losses[0]
            return weighted_mean(losses, self._mean.weights)
        return mean_over_ranks(losses, self._mean.weights, self._device)

    def _finish_simply(self) -> None:
        self._plain_step()
        self._zero_grad()

    def prepare(self) -> None:
        """Average the gradients over all processes and unscale them; ``finish`` does this unless it is already done."""
        if not self.is_prepared:
            self.is_prepared = True
            self._prepare()

    def release(self) -> None:
        """After ``prepare`` and a step of the user's own instead of ``finish``: the next update is prepared again."""
        if self.is_prepared:
            self.is_prepared = False
            if self._grad_scaler is not None:  # it unscales once between two updates of its scale
                self._grad_scaler.update()

    def _finish(self) -> None:
        self.prepare()
        self.is_prepared, self.is_stepping = False, True
        self._step(self._clip())
        self._zero_grad()
        self.is_stepping = False


def _unknown() -> int:
    return 0


def _nothing(*_: object) -> None:
    """Does nothing."""
