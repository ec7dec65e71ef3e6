"""Gradient clipping by the norm of all gradients together, as the parameter groups ask for it."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim import Optimizer


def gradient_clipper(optimizer: Optimizer, max_norm: float | None = None) -> Callable[[], Tensor] | None:
    """What to call between backward and the optimizer's step, or None if no group asks for clipping.

    A group asks by carrying both ``clip_grad_max_norm`` and ``clip_grad_norm_type``; ``max_norm`` asks for the groups
    that do not, with the 2-norm. All groups with the same two
    values are clipped by their one common norm: a norm per group would change the direction of the update. The groups
    are read now, so one added later is not clipped.

    The call gives the norm before clipping as a tensor on the device, and never waits for it. With groups of several
    settings it is the norm over all clipped gradients (of the first setting's type).
    """
    by_setting: dict[tuple[float, float], list[Tensor]] = {}
    for group in optimizer.param_groups:
        limit, norm_type = (
            group.get("clip_grad_max_norm", max_norm),
            group.get("clip_grad_norm_type", _norm_type(max_norm)),
        )
        if limit is not None and norm_type is not None:
            by_setting.setdefault((float(limit), float(norm_type)), []).extend(group["params"])
    if not by_setting:
        return None

    settings = [(params, limit, norm_type) for (limit, norm_type), params in by_setting.items()]
    if len(settings) == 1:
        params, limit, norm_type = settings[0]
        return lambda: torch.nn.utils.clip_grad_norm_(params, limit, norm_type)
    return lambda: _clip_each(settings)


def gradient_norm(optimizer: Optimizer, max_norm: float | None = None) -> Callable[[], Tensor]:
    """What to call between backward and the optimizer's step for the norm of all gradients, on the device.

    They are clipped as :func:`gradient_clipper` says. Where that looks at all of them the norm is its own, else the
    2-norm is computed beside: NaN or infinity in any gradient shows in it.
    """
    clip = gradient_clipper(optimizer, max_norm)
    asks = [group.get("clip_grad_max_norm", max_norm) is not None for group in optimizer.param_groups]
    if clip is not None and all(asks):
        return clip

    def norm_and_clip() -> Tensor:
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if clip is not None:
            clip()
        return norm

    return norm_and_clip


def _norm_type(max_norm: float | None) -> float | None:
    return None if max_norm is None else 2.0


def _clip_each(settings: list[tuple[list[Tensor], float, float]]) -> Tensor:
    norms = [torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type) for params, max_norm, norm_type in settings]
    together = torch.stack([norm.to(norms[0].device) for norm in norms])
    total: Tensor = torch.linalg.vector_norm(together, settings[0][2])
    return total
