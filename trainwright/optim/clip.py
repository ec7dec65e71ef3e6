"""Gradient clipping by the common norm of all gradients, or by value, as set in the parameter groups.

The norm is that of the complete model, also if its gradients are spread over shards, tensor ranks and pipeline stages.
"""

import math
from collections.abc import Callable, Iterable
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainwright._torch_compat.norm_warning import silence_norm_warning
from trainwright.base.devices import wide_dtype
from trainwright.base.dist import (
    TIED_COPY,
    gather_over_pipeline,
    get_pipeline_parallel_size,
    mesh_in_use,
    reduce_over_pipeline,
)
from trainwright.base.errors import ConfigError
from trainwright.optim.named import each_optimizer, parameters_of


def gradient_clipper(
    optimizer: Optimizer, max_norm: float | None = None, max_value: float | None = None
) -> Callable[[], Tensor] | None:
    """A function that clips the gradients, to be called after backward; None if no group is clipped.

    A group is clipped if it has ``clip_grad_max_norm`` and ``clip_grad_norm_type``; ``max_norm`` clips the others by
    the 2-norm. All groups with the same two values are clipped by their common norm: a norm per group would change the
    direction of the update. Each of several optimizers (:class:`NamedOptimizers`) is clipped by its own norm. A group
    with ``clip_grad_value`` is clipped by value: each entry to [-value, value]; ``max_value`` clips the others. The
    groups are read once, so a group that is added later is not clipped. All stages of a pipeline must call this.

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
    for settings, values in gather_over_pipeline(([*by_setting], [*by_value])):  # other stages may have other groups
        by_setting |= {setting: [] for setting in settings if setting not in by_setting}
        by_value |= {value: [] for value in values if value not in by_value}
    clips: list[Callable[[], Tensor]] = [
        partial(_norm_clipper(), by_setting[setting], *setting[1:]) for setting in _in_order(by_setting)
    ]
    clips += [partial(_clip_by_value, by_value[value], value) for value in _in_order(by_value)]
    if len(clips) < 2:
        return clips[0] if clips else None
    norm_type = next((norm_type for *_, norm_type in _in_order(by_setting)), 2.0)
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
    if clip is not None and all(all(one) for one in gather_over_pipeline(is_clipped)):
        return clip

    def norm_and_clip() -> Tensor:
        norm = total_norm(parameters_of(optimizer))
        if clip is not None:
            clip()
        return norm

    return norm_and_clip


def clip_by_norm(params: list[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Clip in place by the norm of all gradients, on all processes; returns the norm before."""
    return _norm_clipper()(params, max_norm, norm_type)


def _norm_clipper() -> Callable[[list[Tensor], float, float], Tensor]:
    """What clips by norm: torch's function, if the model is on one device or each process has a copy."""
    return torch.nn.utils.clip_grad_norm_ if mesh_in_use() is None else _clip_by_norm_on_mesh


def _clip_by_norm_on_mesh(params: list[Tensor], max_norm: float, norm_type: float) -> Tensor:
    norm = total_norm(params, norm_type)
    for parameters in _by_mesh(params):
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


@torch.no_grad()
def total_norm(params: Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
    """The norm of all gradients, of all shards, parts and stages of the model; a tensor on the device.

    Every process must call it. A weight that several stages hold counts once.
    """
    params = [*params]
    if mesh_in_use() is None:
        return torch.nn.utils.get_total_norm([p.grad for p in params if p.grad is not None], norm_type)
    silence_norm_warning()
    device = params[0].device if params else torch.accelerator.current_accelerator() or torch.device("cpu")
    wide, norms = wide_dtype(device), [torch.zeros((), device=device)]
    for same in _by_mesh(p for p in params if not getattr(p, TIED_COPY, False)):
        norm: Any = torch.nn.utils.get_total_norm([p.grad for p in same if p.grad is not None], norm_type)
        norms.append((norm.full_tensor() if hasattr(norm, "full_tensor") else norm).to(device))
    is_max, dtype = math.isinf(norm_type), reduce(torch.promote_types, (norm.dtype for norm in norms))
    if get_pipeline_parallel_size() > 1:
        dtype = torch.float32  # stages may have parameters of different types, and clip by the same norm
    values = torch.stack([norm.to(wide) for norm in norms])
    power = values.amax() if is_max else values.pow(norm_type).sum()
    reduce_over_pipeline(power, is_max=is_max)
    return (power if is_max else power.pow(1 / norm_type)).to(dtype)


def _by_mesh(params: Iterable[Tensor]) -> list[list[Tensor]]:
    """The parameters with gradients, by the device mesh over which these are spread: torch's functions take one."""
    groups: dict[Any, list[Tensor]] = {}
    for parameter in params:
        if parameter.grad is not None:
            groups.setdefault(getattr(parameter.grad, "device_mesh", None), []).append(parameter)
    return [*groups.values()]


def _in_order(settings: Iterable[Any]) -> list[Any]:
    """The same order on each stage of a pipeline; the own order elsewhere."""
    return sorted(settings) if mesh_in_use() is not None else [*settings]


def _clip_by_value(params: list[Tensor], value: float) -> Tensor:
    """Clip in place; returns the 2-norm before, in which NaN and infinity show."""
    norm = total_norm(params)
    for same in [params] if mesh_in_use() is None else _by_mesh(params):
        torch.nn.utils.clip_grad_value_(same, value)
    return norm


def _clip_each(clips: list[Callable[[], Tensor]], norm_type: float) -> Tensor:
    norms = [clip() for clip in clips]
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]), norm_type)
    return total
