"""Activation checkpointing: keep a block's input, and compute the block again in the backward pass.

Less memory for more computation (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost"); the numbers do
not change: the second computation starts from the buffers of the first one, and leaves the current ones as they are.
Selective: results of matrix products and of attention, which take longest to compute, are kept (Korthikanti et al.
2022, "Reducing Activation Recomputation in Large Transformer Models"), and those of exchanges between processes.
Offloaded: the inputs of the blocks wait in host memory.
"""

import contextlib
import functools
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from types import MethodType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from trainwright._torch_compat.recomputed_operations import ignore_repeated
from trainwright.base.errors import ConfigError
from trainwright.base.lazy_names import ring
from trainwright.parallel.simulated import simulation

_Which = Literal[True, "selective", "offload"]

_SMALL = 2**20  # bytes of a buffer
# Operations of torch whose results a selective recomputation keeps, where this torch has them.
_ATTENTIONS = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
_KEPT = ("mm", "addmm", "bmm", "baddbmm", "convolution", *(f"_scaled_dot_product_{name}" for name in _ATTENTIONS))
# Of exchanges: of tensor, expert and context parallel. An all-gather is repeated: its result is larger than its input.
_KEPT_EXCHANGES = ("all_reduce", "reduce_scatter_tensor", "all_to_all_single")


def recompute_blocks(model: nn.Module, which: _Which = True) -> list[str]:
    """Recompute the model's repeated blocks in the backward pass; returns the names of these blocks.

    ``which``: True recomputes all of them, "selective" keeps the results of matrix products, attention and exchanges,
    "offload" keeps the inputs of the blocks in host memory.

    A model with a method ``set_activation_checkpoint`` decides itself: it may do the work, or return the modules to
    recompute. Models of transformers and timm have their own method, whose name is returned; timm's changes buffers
    twice, so it is used for models that have none in their state. Otherwise the blocks are the children of each
    ``nn.ModuleList`` and ``nn.Sequential`` that hold parameters (the outermost ones: a block inside a block is
    recomputed with it).
    """
    names = {module: name for name, module in model.named_modules()}
    decide = getattr(type(model), "set_activation_checkpoint", None)
    if decide is None and getattr(model, "supports_gradient_checkpointing", False):  # transformers, by release
        inner = [module for block in repeated_blocks(model) for module in block.modules() if _has_buffers(module)]
        for module in inner:  # which modules transformers recomputes differs from release to release
            replace_forward(module, _keeping_buffers)
        options = _options(which, has_buffers=bool(inner))
        names_of_method = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
        method = next(name for name in names_of_method if hasattr(model, name))
        # Without an accelerator the inputs are in host memory, and transformers would pin it.
        offload = {"offload": True} if which == "offload" and torch.accelerator.is_available() else {}
        getattr(model, method)({"use_reentrant": False, **options}, **offload)
        return [method]
    method_of_timm = getattr(model, "set_grad_checkpointing", None)
    if decide is None and which is True and callable(method_of_timm) and not _has_state(model):
        method_of_timm(True)
        return ["set_grad_checkpointing"]
    blocks: Iterable[nn.Module] = repeated_blocks(model) if decide is None else decide(model) or ()
    recomputed = []
    for block in blocks:
        replace_forward(block, partial(_recomputed, which=which, has_buffers=_has_buffers(block)))
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
    function = _of_class(block) if own is None else getattr(own, "__func__", called)
    block.forward = MethodType(wrap(function), block)


def _of_class(block: nn.Module) -> Callable[..., Any]:
    """The ``forward`` of a block's class, which FSDP2 changes: in transformers that of the latest class recomputes."""
    forward = type(block).forward
    if not hasattr(block, "gradient_checkpointing"):  # a layer of transformers
        return forward

    @functools.wraps(forward)
    def call(self: nn.Module, *args: Any, **named: Any) -> Any:
        return type(self).forward(self, *args, **named)

    return call


def _has_state(model: nn.Module) -> bool:
    """Whether some buffers are part of the state dict; the others are constants that are computed once."""
    return not model.state_dict().keys().isdisjoint(name for name, _ in model.named_buffers())


def _has_buffers(module: nn.Module) -> bool:
    return next(module.buffers(), None) is not None


def _recomputed(forward: Callable[..., Any], which: _Which, has_buffers: bool) -> Callable[..., Any]:
    options, in_program = _options(which, has_buffers), _options(which)
    saved = partial(save_on_cpu, pin_memory=True) if which == "offload" else contextlib.nullcontext
    computed = _keeping_buffers(forward) if has_buffers else forward

    @functools.wraps(forward)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:  # a module's own signature
        if not torch.is_grad_enabled():
            return forward(self, *args, **kwargs)
        if torch.compiler.is_compiling():  # a compiled program changes its buffers once, outside what it repeats
            return checkpoint(forward, self, *args, use_reentrant=False, **in_program, **kwargs)
        with saved():
            return checkpoint(computed, self, *args, use_reentrant=False, **options, **kwargs)

    return call


_Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]  # of the first and the second computation


def _options(which: _Which, has_buffers: bool = False) -> dict[str, Any]:
    """The arguments of ``checkpoint``."""
    products = _keep_products if which == "selective" else None
    if not has_buffers:
        return {} if products is None else {"context_fn": products}

    def contexts() -> _Contexts:
        before: list[_Buffers] = []
        empty = contextlib.nullcontext()
        first, second = (empty, empty) if products is None else products()
        return _Computation(first, before, is_first=True), _Computation(second, before, is_first=False)

    return {"context_fn": contexts}


def _keep_products() -> _Contexts:
    ignore_repeated()
    found = [getattr(torch.ops.aten, name, None) for name in _KEPT]
    found += [getattr(torch.ops._c10d_functional, name, None) for name in _KEPT_EXCHANGES]
    make: Any = create_selective_checkpoint_contexts
    contexts: _Contexts = make([one.default for one in found if one is not None])
    return contexts


_Buffers = dict[tuple[nn.Module, str], Tensor | None]
_current = threading.local()  # its ``computation``: the `_Computation` of this thread, outside of modules that are kept


def _keeping_buffers(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A ``forward`` whose second computation in a checkpointed call leaves the module's buffers as they are."""

    @functools.wraps(forward)
    def computed(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        current = None if torch.compiler.is_compiling() else getattr(_current, "computation", None)
        if current is None:
            return forward(self, *args, **kwargs)
        _current.computation = None  # the modules inside of this one are kept with it
        try:
            with current.keep_buffers(self):
                return forward(self, *args, **kwargs)
        finally:
            _current.computation = current

    return computed


class _Computation(AbstractContextManager[None]):
    """The first computation of a checkpointed call, or the second, which can come again.

    ``before``: the buffers before the first one, of each module that is kept, in the order of the calls. The second one
    has copies of them in place of the current ones. To put statistics back afterwards is not enough: what a power
    iteration or a codebook gives depends on where it starts.
    """

    def __init__(self, inner: AbstractContextManager[Any], before: list[_Buffers], *, is_first: bool) -> None:
        self._inner, self._before, self._is_first = inner, before, is_first

    def __enter__(self) -> None:
        self._repeated, self._outer = iter(self._before), getattr(_current, "computation", None)
        _current.computation = self
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        _current.computation = self._outer
        return self._inner.__exit__(*error)

    @contextlib.contextmanager
    def keep_buffers(self, module: nn.Module) -> Iterator[None]:
        if self._is_first:
            copies = {key: buffer.clone() for key, buffer in _buffers(module).items()}
            yield
            after = _buffers(module)
            kept = {key: copy for key, copy in copies.items() if _may_change(copy, after.get(key))}
            self._before.append(kept | dict.fromkeys(after.keys() - copies.keys()))
            return
        before, live = next(self._repeated), _buffers(module)
        for (owner, name), buffer in before.items():
            setattr(owner, name, None if buffer is None else buffer.clone())
        try:
            yield
        finally:
            for owner, name in before:
                setattr(owner, name, live.get((owner, name)))


def _buffers(module: nn.Module) -> dict[tuple[nn.Module, str], Tensor]:
    return {(owner, name): b for owner in module.modules() for name, b in owner.named_buffers(recurse=False)}


def _may_change(before: Tensor, after: Tensor | None) -> bool:
    """Whether a copy is needed; only large buffers are compared, because that waits for the device."""
    if after is None or before.nbytes <= _SMALL:
        return True
    return simulation() is None and not torch.equal(before, after)  # a simulated tensor has no values
