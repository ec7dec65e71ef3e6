"""A step of torch's optimizers as in a compiled program: without reading the value of a tensor."""

import functools
import inspect
from collections.abc import Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.optim import optimizer as torch_optimizer

from trainwright._torch_compat.optimizer_import import without_compiler
from trainwright._torch_compat.probing import check_close, fault_of

# The hooks on the gradient of a parameter.
HOOKS, LATE_HOOKS = attrgetter("_backward_hooks"), attrgetter("_post_accumulate_grad_hooks")


@functools.cache
def fault() -> str | None:
    """Why steps cannot be traced with this torch; None if they can."""
    return fault_of(probe)


def run_step(optimizer: Any) -> None:
    """The undecorated step, without hooks and guards, while ``torch.compiler.is_compiling()`` is true."""
    was_compiling = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        inspect.unwrap(type(optimizer).step)(optimizer)
    finally:
        torch.compiler._is_compiling_flag = was_compiling


def step_hooks(optimizer: Any) -> list[Mapping[int, Any]]:
    """The hooks of the step, of this optimizer and global ones. torch never replaces these dictionaries."""
    return [
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        torch_optimizer._global_optimizer_pre_hooks,
        torch_optimizer._global_optimizer_post_hooks,
    ]


def is_torchs(step: Any) -> bool:
    """Whether a class's step is torch's, without wrappers of other packages."""
    while step is not None:
        if not getattr(step, "__globals__", {}).get("__name__", "").startswith("torch."):
            return False
        step = getattr(step, "__wrapped__", None)
    return True


def has_gradient_hooks(parameters: list[Tensor]) -> bool:
    """Whether a parameter has a hook on its gradient."""
    return any(map(HOOKS, parameters)) or any(map(LATE_HOOKS, parameters))


def probe() -> None:
    """Compare three capturable steps of Adam with the known result, and detect hooks on gradients."""
    weight = torch.tensor([0.5, -1.5], dtype=torch.float32, device="cpu", requires_grad=True)
    with without_compiler():
        optimizer = torch.optim.Adam([weight], lr=0.1, capturable=True, foreach=False)
    with torch.no_grad():
        for number in range(3):
            weight.grad = torch.tensor([1.0, -2.0], dtype=torch.float32, device="cpu") + number
            run_step(optimizer)
    check_close("a traced step", weight.tolist(), [0.2076817, -1.2347243])
    assert not torch.compiler.is_compiling(), "torch is still in the compiling state"
    assert not any(step_hooks(optimizer)), "a new optimizer has hooks"
    adders: tuple[Any, ...] = (weight.register_hook, weight.register_post_accumulate_grad_hook)
    for add in adders:
        assert not has_gradient_hooks([weight]), "a removed hook is still found"
        handle = add(_nothing)
        assert has_gradient_hooks([weight]), "a hook on a gradient is not found"
        handle.remove()


def _nothing(gradient: Tensor) -> None:
    """A hook."""
