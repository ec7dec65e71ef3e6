"""Skipped updates: those that would write NaN or infinity into the weights, and those of float16 that overflow."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainwright._torch_compat.optimizer_import import mark_stepped
from trainwright.base.dist import get_pipeline_parallel_size
from trainwright.optim.named import each_optimizer


class ScaledStep:
    """``grad_scaler.step(optimizer)``, which never leaves momentum uninitialized.

    torch's fused SGD allocates its momentum in the first step, and fills it only if that step is not skipped. A first
    step is often skipped: the scale starts at 65536. Until the momentum exists, the host therefore reads whether the
    gradients are finite, and skipped steps are not made at all.
    """

    def __init__(self, grad_scaler: torch.amp.GradScaler, optimizer: Optimizer) -> None:
        self._grad_scaler = grad_scaler
        self._optimizer: Any = optimizer
        is_fused = getattr(optimizer, "_step_supports_amp_scaling", False)
        if is_fused and get_pipeline_parallel_size() > 1:
            for one in each_optimizer(optimizer):
                one.register_step_pre_hook(_use_one_mark)
        self._lacks_momentum = is_fused and isinstance(optimizer, torch.optim.SGD) and not self._has_momentum()

    def __call__(self) -> None:
        if self._lacks_momentum:
            self._step_on_host()
        else:
            self._grad_scaler.step(self._optimizer)
        for optimizer in each_optimizer(self._optimizer):
            mark_stepped(optimizer)  # a skipped step counts, and torch would warn of the schedule that follows

    def _step_on_host(self) -> None:
        self._optimizer._step_supports_amp_scaling = False  # the attribute that the scaler reads
        try:
            self._grad_scaler.step(self._optimizer)
        finally:
            self._optimizer._step_supports_amp_scaling = True
        self._lacks_momentum = not self._has_momentum()

    def _has_momentum(self) -> bool:
        if not any(group["momentum"] for group in self._optimizer.param_groups):
            return True
        return any(state.get("momentum_buffer") is not None for state in self._optimizer.state.values())


def _use_one_mark(optimizer: Any, *_: Any) -> None:
    # The scaler of several stages passes how many of them found infinite gradients, in a tensor of shape (1,). Torch's
    # fused kernels take a tensor of shape (), and skip the update only if it is 1.
    if getattr(optimizer, "found_inf", None) is not None:
        optimizer.found_inf = optimizer.found_inf.reshape(()).clamp(max=1.0)


class SkipNonFinite:
    """A step of ``optimizer`` that changes nothing if the loss or the norm of the gradients is not finite.

    Weights, optimizer state and those of ``buffers`` that hold floats (running statistics, which the forward pass has
    changed by then) stay as they were before the update. An optimizer that takes a flag for it (torch's own with
    ``fused=True``) is synchronized with only until its first step; any other one is synchronized with once per
    update.

    For each update: ``begin``, ``record_loss`` for its losses, which may be several, then ``step``. Without ``begin``
    buffers stay as the forward pass leaves them.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        buffers: Iterable[Tensor] = (),
        *,
        grad_scaler: torch.amp.GradScaler | None = None,
        updates_scale: bool = True,
        sum_over_ranks: Callable[[Tensor], object] | None = None,
    ) -> None:
        """With a ``grad_scaler`` only the loss is checked: the scaler itself skips non-finite gradients.

        ``updates_scale``: call its ``update``, too. ``sum_over_ranks``: adds up the losses of all ranks in place, so
        that all decide together; each of them must step.
        """
        self._updates_scale, self._sum_over_ranks = updates_scale, sum_over_ranks
        self._optimizer = optimizer
        self._buffers = [buffer for buffer in buffers if buffer.is_floating_point()]
        self._kept: list[Tensor] = []  # the buffers before this update, if `begin` was called
        self._grad_scaler = grad_scaler
        self._scaled_step = None if grad_scaler is None else ScaledStep(grad_scaler, optimizer)
        self._loss: Tensor | None = None
        self._has_stepped = False
        self._takes_flag = grad_scaler is None and getattr(optimizer, "_step_supports_amp_scaling", False)

    def begin(self) -> None:
        """Before the first forward pass of an update."""
        self._loss = None
        self._kept = [buffer.clone() for buffer in self._buffers]

    def record_loss(self, loss: Tensor | float) -> None:
        """A loss of this update; without ``sum_over_ranks`` the same on every rank."""
        loss = torch.as_tensor(loss).detach()
        self._loss = loss if self._loss is None else self._loss + loss

    @torch.no_grad()
    def step(self, norm: Tensor | None) -> Tensor | None:
        """Step, unless ``norm`` (of the gradients) or a recorded loss is not finite.

        Returns whether the update was skipped, on the device; None if there was nothing to check.
        """
        if self._loss is not None and self._sum_over_ranks is not None:
            self._loss = self._loss.clone()
            self._sum_over_ranks(self._loss)
        checked = [value for value in (self._loss, None if self._grad_scaler else norm) if value is not None]
        self._loss = None
        kept, self._kept = self._kept, []
        if not checked:
            self._plain_step()
            return None
        is_bad = ~torch.stack([value.isfinite().reshape(()).to(checked[0].device) for value in checked]).all()
        # torch's fused SGD leaves its momentum uninitialized if the very first step is skipped.
        if self._takes_flag and self._has_stepped:
            self._step_with_flag(is_bad, kept)
        else:
            self._step_or_wait(is_bad, kept)
        return is_bad

    def _plain_step(self) -> None:
        if self._grad_scaler is None or self._scaled_step is None:
            self._optimizer.step()
        else:
            self._scaled_step()
            if self._updates_scale:
                self._grad_scaler.update()

    def _step_with_flag(self, is_bad: Tensor, kept: list[Tensor]) -> None:
        self._optimizer.found_inf = is_bad.float()  # type: ignore[attr-defined]
        try:
            self._optimizer.step()
        finally:
            del self._optimizer.found_inf  # type: ignore[attr-defined]
        for buffer, before in zip(self._buffers, kept, strict=False):
            buffer.copy_(torch.where(is_bad, before, buffer))

    def _step_or_wait(self, is_bad: Tensor, kept: list[Tensor]) -> None:
        if is_bad.item():
            # Without gradients a step changes nothing; it is made because schedules and scalers count the calls.
            self._optimizer.zero_grad()
            for buffer, before in zip(self._buffers, kept, strict=False):
                buffer.copy_(before)
        else:
            self._has_stepped = True
        self._plain_step()
