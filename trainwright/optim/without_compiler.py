"""Optimizers made, used, saved and loaded without the import of torch's compiler.

torch keeps its compiler out of what an optimizer does, and imports it for that at the first call: torch._dynamo, 0.5 to
1 s and 70 MiB for a run that compiles nothing. While it has not been imported, there is nothing to be kept out. Once
somebody has, torch's own ways are taken; results are the same by both.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

_COMPILER = "torch._dynamo"
_METHODS = ("add_param_group", "state_dict", "load_state_dict", "zero_grad")
# Where torch._disable_dynamo keeps the guarded form of a function, to make it once. It imports the compiler to make it.
_GUARDED = "__dynamo_disable"


@contextmanager
def without_compiler() -> Iterator[None]:
    """Let optimizers' methods, other than ``step``, run as they are written for the time of the block.

    torch is left as it was. Where it does not look as expected nothing is changed, and the first call imports the
    compiler.
    """
    prepared = [] if _COMPILER in sys.modules else [*filter(None, map(_unguarded, _METHODS))]
    for function in prepared:
        setattr(function, _GUARDED, function)
    try:
        yield
    finally:
        for function in prepared:
            if getattr(function, _GUARDED, None) is function:  # not where another thread has been quicker
                delattr(function, _GUARDED)


class PlainUpdate:
    """``step`` and ``zero_grad`` of any optimizer, with its hooks and the label that a profiler shows."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer: Any = optimizer
        self._class_step: Any = type(optimizer).step  # None: it is not torch's
        self._step = _unguarded_step(type(optimizer))
        self._has_own_zero_grad = type(optimizer).zero_grad is not Optimizer.zero_grad

    def step(self) -> Any:
        """Change the weights by their gradients."""
        optimizer = self._optimizer
        if self._step is None or _COMPILER in sys.modules or not self._is_untouched():
            return optimizer.step()
        result = self._step(optimizer)
        optimizer._opt_called = True  # by which a schedule sees that the step came before it
        return result

    def zero_grad(self) -> None:
        """Set all gradients to None."""
        if self._has_own_zero_grad or "zero_grad" in vars(self._optimizer):
            self._optimizer.zero_grad()
            return
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def _is_untouched(self) -> bool:
        """Whether nobody has put another step in place of the one that was there, of the object or of its class."""
        return type(self._optimizer).step is self._class_step and steps_as_its_class(self._optimizer)


def steps_as_its_class(optimizer: Any) -> bool:
    """Whether ``optimizer.step`` is that of its class, be it with the mark that torch's schedules put around it."""
    own = vars(optimizer).get("step")
    return own is None or getattr(own, "__wrapped__", None) is type(optimizer).step


def is_torchs(step: Any) -> bool:
    """Whether a class's step is one of torch, with nothing of others around it."""
    while step is not None:
        if not getattr(step, "__globals__", {}).get("__name__", "").startswith("torch."):
            return False
        step = getattr(step, "__wrapped__", None)
    return True


def _unguarded(name: str) -> Any:
    """The method as it is written, if torch guards it and has not called it yet."""
    function = getattr(getattr(Optimizer, name, None), "__wrapped__", None)
    return None if function is None or hasattr(function, _GUARDED) else function


def _unguarded_step(optimizer_class: type[Optimizer]) -> Callable[[Optimizer], Any] | None:
    """The step of a class of torch's without what imports the compiler; None for one that does not import it."""
    guarded = getattr(optimizer_class.step, "__wrapped__", None)  # in what calls the hooks
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
