"""Activation checkpointing: keep a block's input, and compute the block again in the backward pass.

Less memory for more computation (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost"); the numbers do
not change. Selective: results of matrix products and of attention, which take longest to compute, are kept (Korthikanti
et al. 2022, "Reducing Activation Recomputation in Large Transformer Models"). Offloaded: the inputs of the blocks wait
in host memory.
"""

import contextlib
import functools
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from types import MethodType
from typing import Any, Literal

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from trainwright._torch_compat.norm_layers import RUNNING_NORMS
from trainwright.config.errors import ConfigError
from trainwright.lazy_names import ring

_Which = Literal[True, "selective", "offload"]

# Operations of torch whose results a selective recomputation keeps, where this torch has them.
_ATTENTIONS = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
_KEPT = ("mm", "addmm", "bmm", "baddbmm", "convolution", *(f"_scaled_dot_product_{name}" for name in _ATTENTIONS))


def recompute_blocks(model: nn.Module, which: _Which = True) -> list[str]:
    """Recompute the model's repeated blocks in the backward pass; returns the names of these blocks.

    ``which``: True recomputes all of them, "selective" keeps the results of matrix products and attention, "offload"
    keeps the inputs of the blocks in host memory.

    A model with a method ``set_activation_checkpoint`` decides itself: it may do the work, or return the modules to
    recompute. Models of transformers and timm have their own method, whose name is returned; timm's counts each batch
    twice in running statistics, so it is used for models without them. Otherwise the blocks are the children of each
    ``nn.ModuleList`` and ``nn.Sequential`` that hold parameters (the outermost ones: a block inside a block is
    recomputed with it).
    """
    names = {module: name for name, module in model.named_modules()}
    decide = getattr(type(model), "set_activation_checkpoint", None)
    options = _options(model, which)
    if decide is None and getattr(model, "supports_gradient_checkpointing", False):  # transformers, by release
        names_of_method = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
        method = next(name for name in names_of_method if hasattr(model, name))
        # Without an accelerator the inputs are in host memory, and transformers would pin it.
        offload = {"offload": True} if which == "offload" and torch.accelerator.is_available() else {}
        getattr(model, method)({"use_reentrant": False, **options}, **offload)
        return [method]
    method_of_timm = getattr(model, "set_grad_checkpointing", None)
    if decide is None and which is True and not options and callable(method_of_timm):
        method_of_timm(True)
        return ["set_grad_checkpointing"]
    blocks: Iterable[nn.Module] = repeated_blocks(model) if decide is None else decide(model) or ()
    recomputed = []
    for block in blocks:
        has_statistics = any(isinstance(module, RUNNING_NORMS) for module in block.modules())
        replace_forward(block, partial(_recomputed, which=which, has_statistics=has_statistics))
        recomputed.append(names[block])
    return recomputed


def compile_blocks(model: nn.Module, device: torch.device) -> None:
    """Compile each repeated block in place, when it is first called; its names in the state dict stay.

    Equal blocks share a program. Dropout draws the numbers of a block that is not compiled.

    Raises:
        ConfigError: the model has no repeated blocks, or there is no C++ compiler for a CPU.
    """
    blocks = [*repeated_blocks(model)]
    if not blocks:
        raise ConfigError(
            f"compile_blocks: {type(model).__name__} has no repeated blocks (children of nn.ModuleList or nn.Sequential"
            " with parameters); nothing can be compiled. Use graph mode, or set it to False."
        )
    compilers = ring("graph.compile_graph").cpp_compilers() if device.type == "cpu" else []
    if compilers and not any(map(shutil.which, compilers)):
        raise ConfigError(f"compile_blocks: there is none of the C++ compilers {', '.join(compilers)}; install one.")
    for block in blocks:
        replace_forward(block, partial(torch.compile, options={"fallback_random": True}))


def repeated_blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost children with parameters of each ``nn.ModuleList`` and ``nn.Sequential``."""
    is_container = isinstance(module, nn.ModuleList | nn.Sequential)
    for child in module.children():
        if is_container and next(child.parameters(), None) is not None:
            yield child
        else:
            yield from repeated_blocks(child)


def replace_forward(block: nn.Module, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace the method of this one object. It is a method still, so that a copy computes with its own weights."""
    own: Any = vars(block).get("forward")
    called = lambda _, *args, **named: own(*args, **named)  # noqa: E731  # a function that is not the block's method
    function = type(block).forward if own is None else getattr(own, "__func__", called)
    block.forward = MethodType(wrap(function), block)


def _recomputed(forward: Callable[..., Any], which: _Which, has_statistics: bool) -> Callable[..., Any]:
    in_program: dict[str, Any] = {"context_fn": _keep_products} if which == "selective" else {}
    saved = partial(save_on_cpu, pin_memory=True) if which == "offload" else contextlib.nullcontext

    @functools.wraps(forward)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:  # a module's own signature
        if not torch.is_grad_enabled():
            return forward(self, *args, **kwargs)
        if torch.compiler.is_compiling():  # a compiled program updates its statistics once, outside what it repeats
            return checkpoint(forward, self, *args, use_reentrant=False, **in_program, **kwargs)
        options = _options(self, which) if has_statistics else in_program
        with saved():
            return checkpoint(forward, self, *args, use_reentrant=False, **options, **kwargs)

    return call


_Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]  # of the first and the second computation


def _options(block: nn.Module, which: _Which) -> dict[str, Any]:
    """The arguments of ``checkpoint``; a second computation must not change running statistics."""
    if not any(isinstance(module, RUNNING_NORMS) for module in block.modules()):
        return {"context_fn": _keep_products} if which == "selective" else {}

    def contexts() -> _Contexts:
        empty = contextlib.nullcontext()
        first, second = _keep_products() if which == "selective" else (empty, empty)
        return first, _kept_running_statistics(block, second)

    return {"context_fn": contexts}


def _keep_products() -> _Contexts:
    found = (getattr(torch.ops.aten, name, None) for name in _KEPT)
    make: Any = create_selective_checkpoint_contexts
    contexts: _Contexts = make([one.default for one in found if one is not None])
    return contexts


@contextlib.contextmanager
def _kept_running_statistics(block: nn.Module, inner: AbstractContextManager[Any]) -> Iterator[None]:
    """While a block is computed for the second time: its norm layers have counted this batch already."""
    # Putting the values back, rather than switching the tracking off: the second pass must save the same tensors as
    # the first.
    buffers = [b for m in block.modules() if isinstance(m, RUNNING_NORMS) for b in m.buffers(recurse=False)]
    kept = [buffer.clone() for buffer in buffers]
    try:
        with inner:
            yield
    finally:
        for buffer, value in zip(buffers, kept, strict=True):
            buffer.data.copy_(value)
