"""Gradient clipping by the common norm of all gradients, as set in the parameter groups."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainwright.optim.named import each_optimizer


def gradient_clipper(optimizer: Optimizer, max_norm: float | None = None) -> Callable[[], Tensor] | None:
    """A function that clips the gradients, to be called after backward; None if no group is clipped.

    A group is clipped if it has ``clip_grad_max_norm`` and ``clip_grad_norm_type``; ``max_norm`` clips the others by
    the 2-norm. All groups with the same two values are clipped by their common norm: a norm per group would change the
    direction of the update. Each of several optimizers (:class:`NamedOptimizers`) is clipped by its own norm. The
    groups are read once, so a group that is added later is not clipped.

    The function returns the norm before clipping as a tensor on the device, without synchronization. For groups with
    different settings it is the norm over all clipped gradients (of the first setting's type).
    """
    by_setting: dict[tuple[int, float, float], list[Tensor]] = {}
    for number, one in enumerate(each_optimizer(optimizer)):
        for group in one.param_groups:
            limit = group.get("clip_grad_max_norm", max_norm)
            norm_type = group.get("clip_grad_norm_type", None if max_norm is None else 2.0)
            if limit is not None and norm_type is not None:
                by_setting.setdefault((number, float(limit), float(norm_type)), []).extend(group["params"])
    if not by_setting:
        return None

    settings = [(params, limit, norm_type) for (_, limit, norm_type), params in by_setting.items()]
    if len(settings) == 1:
        params, limit, norm_type = settings[0]
        return lambda: torch.nn.utils.clip_grad_norm_(params, limit, norm_type)
    return lambda: _clip_each(settings)


def gradient_norm(optimizer: Optimizer, max_norm: float | None = None) -> Callable[[], Tensor]:
    """A function that clips as :func:`gradient_clipper` and returns the norm of all gradients, on the device.

    If only some gradients are clipped, it is the 2-norm of all: NaN or infinity in any gradient shows in it.
    """
    clip = gradient_clipper(optimizer, max_norm)
    is_clipped = [group.get("clip_grad_max_norm", max_norm) is not None for group in optimizer.param_groups]
    if clip is not None and all(is_clipped):
        return clip

    def norm_and_clip() -> Tensor:
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if clip is not None:
            clip()
        return norm

    return norm_and_clip


def _clip_each(settings: list[tuple[list[Tensor], float, float]]) -> Tensor:
    norms = [torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type) for params, max_norm, norm_type in settings]
    together = torch.stack([norm.to(norms[0].device) for norm in norms])
    total: Tensor = torch.linalg.vector_norm(together, settings[0][2])
    return total
