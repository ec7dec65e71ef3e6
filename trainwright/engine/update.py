"""One update of the weights, settled before the first: how losses become gradients, and what is done with them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright.engine.gradients import noted, plain_backward, recorded_norm, recorded_step, scaled_step, unscaled
from trainwright.engine.window import WindowMean
from trainwright.optim.clip import gradient_clipper, gradient_norm
from trainwright.optim.skip import SkipNonFinite


class Update:
    """``begin`` a window, ``backward`` each of its micro-batches, and ``finish``: clip, step, no gradients left.

    Args:
        step: what makes the optimizer's step.
        accumulates: whether windows have more than one micro-batch.
        skip_non_finite: leave an update out whose loss or gradients are not finite.
        grad_scaler: for gradients in float16.
        count: the samples of a batch, where somebody knows better than its tensors.

    Attributes:
        note: to be shown what the model returns for a batch before its ``backward``; None: not needed.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        step: Callable[[], Any],
        *,
        accumulates: bool,
        skip_non_finite: bool,
        grad_scaler: torch.amp.GradScaler | None = None,
        count: Callable[[Any], int] | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._step: Callable[[Tensor | None], object] = lambda norm: step()
        self._prepare: Callable[[], None] = _nothing
        is_scaled = grad_scaler is not None
        differentiate: Callable[[Tensor], None] = Tensor.backward
        if grad_scaler is not None:
            differentiate = partial(_scaled_backward, grad_scaler)
            self._prepare = unscaled(grad_scaler, optimizer, _nothing)
            self._step = scaled_step(grad_scaler, optimizer)
        self._mean = WindowMean(optimizer, count, differentiate)
        self.note = self._mean.note if accumulates else None
        self.begin: Callable[[int], None] = self._mean.begin
        self.backward: Callable[[Tensor, Any], None] = (
            self._mean.backward if accumulates or is_scaled else plain_backward
        )
        self._clip = recorded_norm(gradient_clipper(optimizer), is_scaled=is_scaled)
        if skip_non_finite:
            skip = SkipNonFinite(optimizer, model.buffers(), grad_scaler=grad_scaler)
            self.begin, self.backward = noted(skip, self.begin, self.backward)
            self._clip = recorded_norm(gradient_norm(optimizer), is_scaled=is_scaled)
            self._step = recorded_step(skip)

    @property
    def weights(self) -> list[Any]:
        """What the micro-batches of this window weigh: samples, or tokens on the device."""
        return self._mean.weights

    def finish(self) -> None:
        """Use the gradients and set them to None."""
        self._prepare()
        self._step(self._clip())
        self._optimizer.zero_grad()


def _scaled_backward(grad_scaler: torch.amp.GradScaler, loss: Tensor) -> None:
    grad_scaler.scale(loss).backward()  # type: ignore[no-untyped-call]


def _nothing() -> None:
    """Where there is nothing to prepare."""
