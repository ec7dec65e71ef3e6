"""Create, use, save and load optimizers without importing torch's compiler.

torch excludes the methods of optimizers from compilation, and imports torch._dynamo for that at the first call: 1.2 s
of CPU time and 70 MiB (torch 2.13) in a run that compiles nothing. Until it is imported, nothing has to be excluded,
and the undecorated methods are called; afterwards torch's own. The results are the same.
"""

import functools
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.optim import Optimizer

from trainwright._torch_compat.probing import check_close, is_usable

_COMPILER = "torch._dynamo"
_METHODS = ("add_param_group", "state_dict", "load_state_dict", "zero_grad")
# The attribute in which torch._disable_dynamo caches the guarded form of a function. Creating it imports the compiler.
_GUARDED = "__dynamo_disable"


@contextmanager
def without_compiler() -> Iterator[None]:
    """Run the methods of optimizers other than ``step`` undecorated within the block.

    If torch does not look as expected, nothing is changed, and the first call imports the compiler.
    """
    is_needed = _COMPILER not in sys.modules and _is_usable()
    with _unguarded_methods() if is_needed else nullcontext():
        yield


@contextmanager
def _unguarded_methods() -> Iterator[None]:
    prepared = [*filter(None, map(_unguarded, _METHODS))]
    for function in prepared:
        setattr(function, _GUARDED, function)
    try:
        yield
    finally:
        for function in prepared:
            if getattr(function, _GUARDED, None) is function:  # otherwise another thread has deleted it
                delattr(function, _GUARDED)


class PlainUpdate:
    """``step`` and ``zero_grad`` of any optimizer, with its hooks and profiler label."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer: Any = optimizer
        self._class_step: Any = type(optimizer).step
        self._step = _unguarded_step(type(optimizer)) if _is_usable() else None
        self._has_own_zero_grad = type(optimizer).zero_grad is not Optimizer.zero_grad

    def step(self) -> Any:
        """Update the weights."""
        optimizer = self._optimizer
        if self._step is None or _COMPILER in sys.modules or not steps_as(self._class_step, optimizer):
            return optimizer.step()
        result = self._step(optimizer)
        mark_stepped(optimizer)
        return result

    def zero_grad(self) -> None:
        """Set all gradients to None."""
        if self._has_own_zero_grad or "zero_grad" in vars(self._optimizer):
            self._optimizer.zero_grad()
            return
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None


def probe() -> None:
    """Compare steps and state of an optimizer without the compiler with the known values."""
    weight, other = (torch.ones(1, dtype=torch.float32, device="cpu", requires_grad=True) for _ in range(2))
    with _unguarded_methods(), warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9, foreach=False)
        optimizer.add_param_group({"params": [other], "lr": 0.5})
        optimizer.load_state_dict(optimizer.state_dict())
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        step = _unguarded_step(torch.optim.SGD)
        if step is None:
            return  # it has no decorator that imports the compiler
        for _ in range(2):
            weight.grad, other.grad = torch.full_like(weight, 2.0), torch.full_like(other, 2.0)
            step(optimizer)
            mark_stepped(optimizer)
            optimizer.zero_grad()
        schedule.step()
        assert weight.grad is None, "gradients are not set to None"
        momenta = [float(state["momentum_buffer"]) for state in optimizer.state_dict()["state"].values()]
    check_close("SGD", [weight.item(), other.item(), *momenta], [0.42, -1.9, 3.8, 3.8])


@functools.cache
def _is_usable() -> bool:
    return is_usable("optimizers without torch's compiler", probe)


def mark_stepped(optimizer: Any) -> None:
    """Record for schedulers that the optimizer has stepped, as ``optimizer.step`` does."""
    optimizer._opt_called = True


def steps_as(class_step: Any, optimizer: Any) -> bool:
    """Whether the step of the object and of its class is ``class_step``, possibly wrapped by a scheduler of torch."""
    own = vars(optimizer).get("step")
    return type(optimizer).step is class_step and (own is None or getattr(own, "__wrapped__", None) is class_step)


def _unguarded(name: str) -> Any:
    """The undecorated method, if torch guards it and has not called it yet."""
    function = getattr(getattr(Optimizer, name, None), "__wrapped__", None)
    return None if function is None or hasattr(function, _GUARDED) else function


def _unguarded_step(optimizer_class: type[Optimizer]) -> Callable[[Optimizer], Any] | None:
    """The step of a class of torch without the import of the compiler; None if it does not import it."""
    guarded = getattr(optimizer_class.step, "__wrapped__", None)  # inside the wrapper that calls the hooks
    written = getattr(guarded, "__wrapped__", None)
    if written is None or getattr(getattr(guarded, "__code__", None), "co_name", "") != "_use_grad":
        return None

    @functools.wraps(written)
    def step(self: Optimizer) -> Any:
        grad_was_enabled = torch.is_grad_enabled()
        torch.set_grad_enabled(self.defaults["differentiable"])
        try:
            return written(self)
        finally:
            torch.set_grad_enabled(grad_was_enabled)

    return Optimizer.profile_hook_step(step)
