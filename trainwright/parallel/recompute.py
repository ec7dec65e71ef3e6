"""Activation checkpointing: keep a block's input, and compute the block again in the backward pass.

Less memory for more computation (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost"); the numbers do
not change.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from trainwright._torch_compat.norm_layers import RUNNING_NORMS


def recompute_blocks(model: nn.Module) -> list[str]:
    """Recompute the model's repeated blocks in the backward pass; returns the names of these blocks.

    A model with a method ``set_activation_checkpoint`` decides itself: it may do the work, or return the modules to
    recompute. Models of transformers and timm have their own method, whose name is returned; timm's counts each batch
    twice in running statistics, so it is used for models without them. Otherwise the blocks are the children of each
    ``nn.ModuleList`` and ``nn.Sequential`` that hold parameters (the outermost ones: a block inside a block is
    recomputed with it).
    """
    names = {module: name for name, module in model.named_modules()}
    decide = getattr(type(model), "set_activation_checkpoint", None)
    options = _options(model)
    if decide is None and getattr(model, "supports_gradient_checkpointing", False):  # transformers, by release
        names_of_method = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
        method = next(name for name in names_of_method if hasattr(model, name))
        getattr(model, method)({"use_reentrant": False, **options})
        return [method]
    if decide is None and not options and callable(method_of_timm := getattr(model, "set_grad_checkpointing", None)):
        method_of_timm(True)
        return ["set_grad_checkpointing"]
    blocks: Iterable[nn.Module] = repeated_blocks(model) if decide is None else decide(model) or ()
    recomputed = []
    for block in blocks:
        block.forward = _recomputed(block)
        recomputed.append(names[block])
    return recomputed


def repeated_blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost children with parameters of each ``nn.ModuleList`` and ``nn.Sequential``."""
    is_container = isinstance(module, nn.ModuleList | nn.Sequential)
    for child in module.children():
        if is_container and next(child.parameters(), None) is not None:
            yield child
        else:
            yield from repeated_blocks(child)


def _recomputed(block: nn.Module) -> Callable[..., Any]:
    forward, options = block.forward, _options(block)

    @functools.wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:  # a module's own signature
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if torch.compiler.is_compiling():  # a compiled program updates its statistics once, outside what it repeats
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)

    return call


def _options(block: nn.Module) -> dict[str, Any]:
    """The arguments of ``checkpoint`` for a block whose second computation must not change its running statistics."""
    if not any(isinstance(module, RUNNING_NORMS) for module in block.modules()):
        return {}
    return {"context_fn": lambda: (contextlib.nullcontext(), _kept_running_statistics(block))}


@contextlib.contextmanager
def _kept_running_statistics(block: nn.Module) -> Iterator[None]:
    """While a block is computed for the second time: its norm layers have counted this batch already."""
    # Putting the values back, rather than switching the tracking off: the second pass must save the same tensors as
    # the first.
    buffers = [b for m in block.modules() if isinstance(m, RUNNING_NORMS) for b in m.buffers(recurse=False)]
    kept = [buffer.clone() for buffer in buffers]
    try:
        yield
    finally:
        for buffer, value in zip(buffers, kept, strict=True):
            buffer.data.copy_(value)
