"""How an update uses its gradients, in the pieces that a trainer settles on before its first step."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainwright.events.storage import get_event_storage, has_event_storage
from trainwright.optim.skip import SkipNonFinite


def recorded_norm(clip: Callable[[], Tensor] | None, *, is_scaled: bool = False) -> Callable[[], Tensor | None]:
    """``clip``, with the norm that it gives put as ``grad_norm``; without one there is nothing to do.

    ``is_scaled``: a gradient scaler meets infinite norms and leaves such updates out, so nobody else need look at them
    (:class:`~trainwright.hooks.FiniteCheck` looks at what is put as noisy).
    """
    if clip is None:
        return _nothing

    def clip_and_put() -> Tensor:
        norm = clip()
        if has_event_storage():  # not in a loop of the user's own
            get_event_storage().put_scalar("grad_norm", norm, smoothing_hint=not is_scaled)
        return norm

    return clip_and_put


def recorded_step(skip: SkipNonFinite) -> Callable[[Tensor | None], None]:
    """The step of ``skip``, with whether it was left out put as ``skipped_update`` (0 or 1)."""

    def step_and_put(norm: Tensor | None) -> None:
        is_skipped = skip.step(norm)
        if is_skipped is not None and has_event_storage():
            get_event_storage().put_scalar("skipped_update", is_skipped, smoothing_hint=False)

    return step_and_put


def scaled_backward(grad_scaler: torch.amp.GradScaler, loss: Tensor, *, retain_graph: bool = False) -> None:
    """The backward pass of a loss times the scale that gradients in float16 need."""
    grad_scaler.scale(loss).backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]


def noted(
    skip: Any, begin: Callable[[int], None] | None, backward: Callable[[Tensor, Any], None]
) -> tuple[Callable[[int], None], Callable[[Tensor, Any], None]]:
    """``begin`` of a window and ``backward`` of its losses, of which ``skip``, as SkipNonFinite is, is told."""

    def begin_window(length: int) -> None:
        skip.begin()
        if begin is not None:
            begin(length)

    def noted_backward(loss: Tensor, batch: Any) -> None:
        skip.record_loss(loss)
        backward(loss, batch)

    return begin_window, noted_backward


def scaled_step(grad_scaler: torch.amp.GradScaler, optimizer: Optimizer) -> Callable[[Tensor | None], None]:
    """The step of float16: left out where the scale has been too large for the gradients."""

    def step(norm: Tensor | None) -> None:
        grad_scaler.step(optimizer)
        grad_scaler.update()

    return step


def unscaled(grad_scaler: torch.amp.GradScaler, optimizer: Optimizer, finish: Callable[[], None]) -> Callable[[], None]:
    """``finish``, on gradients that are as they would be without the scaler."""

    def unscale_and_finish() -> None:
        grad_scaler.unscale_(optimizer)
        finish()

    return unscale_and_finish


def _nothing() -> None:
    """Where nobody asks for the norm."""
