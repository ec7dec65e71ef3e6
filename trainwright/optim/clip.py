"""Gradient clipping by the common norm of all gradients, or by value, as set in the parameter groups."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainwright.config.errors import ConfigError
from trainwright.optim.named import each_optimizer


def gradient_clipper(
    optimizer: Optimizer, max_norm: float | None = None, max_value: float | None = None
) -> Callable[[], Tensor] | None:
    """A function that clips the gradients, to be called after backward; None if no group is clipped.

    A group is clipped if it has ``clip_grad_max_norm`` and ``clip_grad_norm_type``; ``max_norm`` clips the others by
    the 2-norm. All groups with the same two values are clipped by their common norm: a norm per group would change the
    direction of the update. Each of several optimizers (:class:`NamedOptimizers`) is clipped by its own norm. A group
    with ``clip_grad_value`` is clipped by value: each entry to [-value, value]; ``max_value`` clips the others. The
    groups are read once, so a group that is added later is not clipped.

    The function returns the norm before clipping as a tensor on the device, without synchronization. For groups with
    different settings it is the norm over all clipped gradients (of the first setting's type).

    Raises:
        ConfigError: a group is to be clipped by norm and by value.
    """
    by_setting: dict[tuple[int, float, float], list[Tensor]] = {}
    by_value: dict[float, list[Tensor]] = {}
    for number, one in enumerate(each_optimizer(optimizer)):
        for group in one.param_groups:
            limit, value = group.get("clip_grad_max_norm", max_norm), group.get("clip_grad_value", max_value)
            norm_type = group.get("clip_grad_norm_type", None if max_norm is None else 2.0)
            if value is not None and limit is not None:
                raise ConfigError(
                    f"clip_grad_value: got {value} with clip_grad_max_norm={limit}: clip by value or by norm. Set one"
                    " of them to None."
                )
            if value is not None:
                by_value.setdefault(float(value), []).extend(group["params"])
            elif limit is not None and norm_type is not None:
                by_setting.setdefault((number, float(limit), float(norm_type)), []).extend(group["params"])
    clips: list[Callable[[], Tensor]] = [
        partial(torch.nn.utils.clip_grad_norm_, params, limit, norm_type)
        for (_, limit, norm_type), params in by_setting.items()
    ]
    clips += [partial(_clip_by_value, params, value) for value, params in by_value.items()]
    if len(clips) < 2:
        return clips[0] if clips else None
    norm_type = next((norm_type for *_, norm_type in by_setting), 2.0)
    return lambda: _clip_each(clips, norm_type)


def gradient_norm(
    optimizer: Optimizer, max_norm: float | None = None, max_value: float | None = None
) -> Callable[[], Tensor]:
    """A function that clips as :func:`gradient_clipper` and returns the norm of all gradients, on the device.

    If only some gradients are clipped, it is the 2-norm of all: NaN or infinity in any gradient shows in it.
    """
    clip = gradient_clipper(optimizer, max_norm, max_value)
    limits = {"clip_grad_max_norm": max_norm, "clip_grad_value": max_value}
    is_clipped = [
        any(group.get(name, limit) is not None for name, limit in limits.items()) for group in optimizer.param_groups
    ]
    if clip is not None and all(is_clipped):
        return clip

    def norm_and_clip() -> Tensor:
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if clip is not None:
            clip()
        return norm

    return norm_and_clip


def _clip_by_value(params: list[Tensor], value: float) -> Tensor:
    """Clip in place; returns the 2-norm before, in which NaN and infinity show."""
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in params if parameter.grad is not None])
    torch.nn.utils.clip_grad_value_(params, value)
    return norm


def _clip_each(clips: list[Callable[[], Tensor]], norm_type: float) -> Tensor:
    norms = [clip() for clip in clips]
    together = torch.stack([norm.to(norms[0].device) for norm in norms])
    total: Tensor = torch.linalg.vector_norm(together, norm_type)
    return total
