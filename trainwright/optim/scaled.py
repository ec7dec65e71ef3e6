"""The step of float16: skipped where a gradient is infinite, because the loss scale was too large for it."""

from typing import Any

import torch
from torch.optim import Optimizer

from trainwright._torch_compat.optimizer_import import mark_stepped


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
        self._lacks_momentum = is_fused and isinstance(optimizer, torch.optim.SGD) and not self._has_momentum()

    def __call__(self) -> None:
        if self._lacks_momentum:
            self._step_on_host()
        else:
            self._grad_scaler.step(self._optimizer)
        mark_stepped(self._optimizer)  # a skipped step counts, and torch would warn of the schedule that follows

    def _step_on_host(self) -> None:
        self._optimizer._step_supports_amp_scaling = False  # what the scaler asks for
        try:
            self._grad_scaler.step(self._optimizer)
        finally:
            self._optimizer._step_supports_amp_scaling = True
        self._lacks_momentum = not self._has_momentum()

    def _has_momentum(self) -> bool:
        if not any(group["momentum"] for group in self._optimizer.param_groups):
            return True
        return any(state.get("momentum_buffer") is not None for state in self._optimizer.state.values())
