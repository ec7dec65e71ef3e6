"""Automatic mixed precision, applied to a model once, before training."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any, Literal

import torch
from torch import nn

from trainwright.base.dist import get_pipeline_parallel_size
from trainwright.parallel.pipeline import pipeline_of


def autocast_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where the device computes in it (every CPU does), else float16."""
    if device.type == "cuda" and not torch.cuda.is_bf16_supported():
        return torch.float16
    return torch.bfloat16


def half_of(device: torch.device) -> Literal["bf16", "fp16"]:
    """:func:`autocast_dtype` by the name that settings have for it."""
    return "bf16" if autocast_dtype(device) is torch.bfloat16 else "fp16"


def apply_autocast(model: nn.Module, device: torch.device) -> torch.amp.GradScaler | None:
    """Make every call of ``model`` run under autocast.

    Weights and optimizer state stay as they are (float32). Returns the gradient scaler that float16 needs, with
    ``torch.amp``'s defaults (first scale 65536, doubled every 2000 good steps); None for bfloat16, which needs none.
    """
    autocast, grad_scaler = autocast_and_scaler(device)
    run_under(model, autocast)
    return grad_scaler


def autocast_and_scaler(
    device: torch.device, dtype: torch.dtype | None = None
) -> tuple[Callable[[], torch.autocast], torch.amp.GradScaler | None]:
    """What builds the context of mixed precision, and the gradient scaler of float16 (see :func:`apply_autocast`)."""
    dtype = dtype or autocast_dtype(device)
    autocast = functools.partial(torch.autocast, device.type, dtype=dtype)
    return autocast, make_grad_scaler(device) if dtype is torch.float16 else None


def make_grad_scaler(device: torch.device) -> torch.amp.GradScaler:
    """A gradient scaler. All processes skip an update if one of them has infinite gradients in its part of the model.

    Data parallelism averages the gradients, which are infinite on all of its processes then, and torch asks all
    processes that share a parameter. Stages of a pipeline share none.
    """
    if get_pipeline_parallel_size() == 1:
        return torch.amp.GradScaler(device.type)
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    return ShardedGradScaler(device.type, process_group=torch.distributed.group.WORLD)


def run_under(model: nn.Module, autocast: Callable[[], torch.autocast] | None) -> None:
    """Make every call of ``model`` run in a context of ``autocast``, or in none; what this has made before is undone.

    The method of this one object is replaced, and no wrapper put around it: names in its state dict stay the same. It
    is a method still, so that a copy of the model computes with the copy's weights.
    """
    _remove_autocast(model)
    if autocast is None:
        return
    own = vars(model).get("forward")
    # torch's decorator over the class's function: no frame of ours, and a method still.
    under = autocast()(type(model).forward if own is None else lambda _, *args, **kwargs: own(*args, **kwargs))
    under.runs_under_autocast, under.replaced = True, own
    model.forward = MethodType(under, model)


def _remove_autocast(model: nn.Module) -> Any:
    """Undo :func:`run_under`; returns the method that was removed, or None."""
    under: Any = vars(model).get("forward")
    if not hasattr(under, "runs_under_autocast"):
        return None
    if under.replaced is None:
        del model.forward
    else:
        model.forward = under.replaced
    return under


@contextmanager
def without_autocast(model: nn.Module) -> Iterator[None]:
    """Calls of ``model`` compute in the precision of its weights inside."""
    pipeline = pipeline_of(model)
    removed = [(part, _remove_autocast(part)) for part in ([model] if pipeline is None else pipeline.stages)]
    try:
        yield
    finally:
        for part, under in removed:
            if under is not None:
                part.forward = under
