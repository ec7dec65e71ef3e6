"""How an update uses its gradients: functions that a trainer composes before its first step."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainwright.config.errors import ConfigError
from trainwright.events.storage import get_event_storage, has_event_storage
from trainwright.optim.skip import ScaledStep, SkipNonFinite


def recorded_norm(clip: Callable[[], Tensor] | None, *, is_scaled: bool = False) -> Callable[[], Tensor | None]:
    """``clip``, whose norm is also stored as ``grad_norm``; does nothing if ``clip`` is None.

    ``is_scaled``: a gradient scaler skips updates with infinite norms, so no other check is needed
    (:class:`~trainwright.hooks.FiniteCheck` checks values stored with ``smoothing_hint=True``).
    """
    if clip is None:
        return _nothing

    def clip_and_put() -> Tensor:
        norm = clip()
        if has_event_storage():  # not in a user's own loop
            get_event_storage().put_scalar("grad_norm", norm, smoothing_hint=not is_scaled)
        return norm

    return clip_and_put


def recorded_step(skip: SkipNonFinite) -> Callable[[Tensor | None], None]:
    """The step of ``skip``, which also stores whether it was skipped as ``skipped_update`` (0 or 1)."""

    def step_and_put(norm: Tensor | None) -> None:
        is_skipped = skip.step(norm)
        if is_skipped is not None and has_event_storage():
            get_event_storage().put_scalar("skipped_update", is_skipped, smoothing_hint=False)

    return step_and_put


def scaled_backward(grad_scaler: torch.amp.GradScaler, loss: Tensor, *, retain_graph: bool = False) -> None:
    """Backward pass of the scaled loss, as gradients in float16 require."""
    grad_scaler.scale(loss).backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]


def record_for_skip(
    skip: Any, begin: Callable[[int], None] | None, backward: Callable[[Tensor, Any], None]
) -> tuple[Callable[[int], None], Callable[[Tensor, Any], None]]:
    """``begin`` of a window and ``backward`` of its losses, which also inform ``skip`` (a SkipNonFinite)."""

    def begin_window(length: int) -> None:
        skip.begin()
        if begin is not None:
            begin(length)

    def recorded_backward(loss: Tensor, batch: Any) -> None:
        skip.record_loss(loss)
        backward(loss, batch)

    return begin_window, recorded_backward


def scaled_step(grad_scaler: torch.amp.GradScaler, optimizer: Optimizer) -> Callable[[Tensor | None], None]:
    """The step in float16: skipped if the scale was too large for the gradients."""

    scaled = ScaledStep(grad_scaler, optimizer)

    def step(norm: Tensor | None) -> None:
        scaled()
        grad_scaler.update()

    return step


def unscaled(grad_scaler: torch.amp.GradScaler, optimizer: Optimizer, finish: Callable[[], None]) -> Callable[[], None]:
    """``finish`` with unscaled gradients."""

    def unscale_and_finish() -> None:
        try:
            grad_scaler.unscale_(optimizer)
        except AssertionError as error:  # it has not scaled any loss yet
            raise ConfigError(
                "float16: the gradients are not scaled. Call self.backward(loss) instead of loss.backward()."
            ) from error
        finish()

    return unscale_and_finish


def _nothing() -> None:
    """Used if nothing needs the norm."""
