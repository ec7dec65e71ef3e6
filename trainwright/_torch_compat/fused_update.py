"""The step of torch's fused optimizers with cached lists: only the kernel is called.

For a tiny network ``optimizer.step()`` takes 25 us and its kernel 9 us: the rest is a profiler label, hooks that are
not set, and new lists of parameters, gradients and states. The lists are reused while torch would build equal ones.
The kernel and its arguments are torch's, so the result is bitwise equal.
"""

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, repeat
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from trainwright._torch_compat.optimizer_import import PlainUpdate, is_torchs, mark_stepped, steps_as, without_compiler
from trainwright._torch_compat.probing import check_close, is_usable
from trainwright._torch_compat.tensor_chunks import is_dtensor

_ONE = torch.ones((), device="cpu")
_GRADIENT = attrgetter("grad")

Group = dict[str, Any]
# (group, parameters, gradients, the lists of states that torch's _init_group gives, in its order)
Kernel = Callable[[Group, list[Tensor], list[Tensor], Sequence[list[Tensor]]], None]


def direct(optimizer: Optimizer) -> "DirectUpdate | PlainUpdate":
    """An object with ``step`` and ``zero_grad`` of the optimizer, faster if possible."""
    kind = type(optimizer)
    parameter = next((p for group in optimizer.param_groups for p in group["params"]), None)
    has_kernel = kind in _KERNELS and is_torchs(kind.step)
    is_fused = has_kernel and all(map(_is_fused, optimizer.param_groups))
    if is_fused and parameter is not None and _is_usable(kind.__name__, parameter.device.type):
        return DirectUpdate(optimizer)
    return PlainUpdate(optimizer)


def probe(kind: type[Optimizer], device: str = "cpu") -> None:
    """Compare three direct steps of ``kind`` with the known result; a scheduler must not warn."""
    make: Any = kind
    weight = torch.tensor([0.5, -1.5], dtype=torch.float32, device=device, requires_grad=True)
    settings, expected = _KNOWN_STEPS[kind]
    with without_compiler(), warnings.catch_warnings():
        optimizer = make([weight], lr=0.1, fused=True, **settings)
        warnings.simplefilter("error")
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        update = DirectUpdate(optimizer)
        for number in range(3):
            weight.grad = torch.tensor([1.0, -2.0], dtype=torch.float32, device=device) + number
            update.step()
            schedule.step()
    check_close(f"the fused step of {kind.__name__}", weight.tolist(), expected)


@functools.cache
def _is_usable(name: str, device: str) -> bool:
    return is_usable(f"the steps of {name}", lambda: probe(getattr(torch.optim, name), device))


def step_hooks(optimizer: Any) -> list[Mapping[int, Any]]:
    """The hooks of the step, of this optimizer and global ones. torch never replaces these dictionaries."""
    return [
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        torch_optimizer._global_optimizer_pre_hooks,
        torch_optimizer._global_optimizer_post_hooks,
    ]


class DirectUpdate(PlainUpdate):
    """Steps of torch's Adam, AdamW, SGD or Adagrad.

    ``optimizer.step`` is called in all other cases: hooks on the optimizer, a replaced step of the object or its class,
    a learning rate that is a tensor, parameters on several devices, other settings than fused. Changes between steps
    are detected: groups, frozen parameters, states that were loaded or reset.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        if not is_torchs(self._class_step):
            self._class_step = None
        self._step_hooks = step_hooks(optimizer)
        self._parts: list[_Part] = []
        self._built_of: list[Any] = []  # what the parts depend on, when they were built

    def step(self) -> None:
        """Update the weights."""
        gradients = None
        if steps_as(self._class_step, self._optimizer) and not any(self._step_hooks):
            gradients = self._gradients()
            if gradients is None:
                self._prepare()
                gradients = self._gradients()
        if gradients is None:
            super().step()
            return
        grad_was_enabled = torch.is_grad_enabled()
        torch.set_grad_enabled(False)  # a block of torch.no_grad() takes as long as a small kernel
        try:
            for part, of_part in zip(self._parts, gradients, strict=True):
                part.run(of_part)
        finally:
            torch.set_grad_enabled(grad_was_enabled)
        mark_stepped(self._optimizer)

    def _gradients(self) -> list[list[Any]] | None:
        """The gradients of each part; None if torch would now build other lists than those of the parts."""
        built_of = _lists_depend_on(self._optimizer)
        if not self._parts or len(built_of) != len(self._built_of) or not all(map(is_, built_of, self._built_of)):
            return None
        gradients = []
        for part in self._parts:
            of_part = [*map(_GRADIENT, part.parameters)]
            if (
                any(map(is_, of_part, repeat(None)))
                or (part.others and not all(map(is_, map(_GRADIENT, part.others), repeat(None))))
                or isinstance(part.group["lr"], Tensor)
            ):
                return None
            gradients.append(of_part)
        return gradients

    def _prepare(self) -> None:
        """Build the lists with torch's own function, which also creates missing states."""
        groups = self._optimizer.param_groups
        parts = [_Part(self._optimizer, group) for group in groups] if all(map(_is_fused, groups)) else []
        self._parts = parts if all(part.is_plain() for part in parts) else []
        self._built_of = _lists_depend_on(self._optimizer)


class _Part:
    """The arguments of the kernel for one parameter group."""

    def __init__(self, optimizer: Any, group: Group) -> None:
        self.group = group
        self.kernel, num_states = _KERNELS[type(optimizer)]
        self.parameters: list[Tensor] = []
        self.states: list[list[Tensor]] = [[] for _ in range(num_states)]
        optimizer._init_group(group, self.parameters, [], *self.states)  # only parameters with a gradient
        taken = {id(parameter) for parameter in self.parameters}
        self.others = [parameter for parameter in group["params"] if id(parameter) not in taken]

    def run(self, gradients: list[Tensor]) -> None:
        """Call the kernel. Gradients are disabled."""
        self.kernel(self.group, self.parameters, gradients, self.states)

    def is_plain(self) -> bool:
        """Whether one call of the kernel updates the group."""
        kinds = {(parameter.device, parameter.dtype) for parameter in self.parameters}
        # SGD has no momentum before its first step, which is torch's.
        has_all = not any(map(is_, chain.from_iterable(self.states), repeat(None)))
        is_shared = any(map(is_dtensor, self.parameters))
        is_sparse = any(p.grad is not None and p.grad.is_sparse for p in self.parameters)
        return len(kinds) == 1 and has_all and not is_shared and not is_sparse


def _lists_depend_on(optimizer: Any) -> list[Any]:
    """The objects on which torch's lists of tensors depend: states, groups, their parameters and settings."""
    found = [*optimizer.state, *chain.from_iterable(map(dict.values, optimizer.state.values()))]
    for group in optimizer.param_groups:
        found += group, group["fused"], group.get("momentum", 0) != 0, group.get("amsgrad"), *group["params"]
    return found


def _is_fused(group: Group) -> bool:
    is_simple = not (group.get("differentiable") or group.get("capturable"))
    return bool(group["fused"]) and is_simple and not any(isinstance(beta, Tensor) for beta in group.get("betas", ()))


def _adam(group: Group, params: list[Tensor], gradients: list[Tensor], states: Sequence[list[Tensor]]) -> None:
    averages, squares, largest_squares, steps = states
    beta1, beta2 = group["betas"]
    _count(steps)
    kernel = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
    kernel(
        params, gradients, averages, squares, largest_squares, steps,
        lr=group["lr"], beta1=beta1, beta2=beta2, eps=group["eps"], weight_decay=group["weight_decay"],
        amsgrad=group["amsgrad"], maximize=group["maximize"],
    )  # fmt: skip


def _count(steps: list[Tensor]) -> None:
    """Add 1 to each. On a CPU, torch creates a tensor of the 1 for each of them, which takes as long as the kernel."""
    if steps[0].device.type == "cpu":
        torch._foreach_add_(steps, _ONE, alpha=1.0)
    else:
        torch._foreach_add_(steps, 1)


def _sgd(group: Group, params: list[Tensor], gradients: list[Tensor], states: Sequence[list[Tensor]]) -> None:
    torch._fused_sgd_(
        params, gradients, states[0],
        lr=group["lr"], momentum=group["momentum"], dampening=group["dampening"], nesterov=group["nesterov"],
        weight_decay=group["weight_decay"], maximize=group["maximize"], is_first_step=False,
    )  # fmt: skip


def _adagrad(group: Group, params: list[Tensor], gradients: list[Tensor], states: Sequence[list[Tensor]]) -> None:
    sums, steps = states
    _count(steps)
    torch._fused_adagrad_(
        params, gradients, sums, steps,
        lr=group["lr"], lr_decay=group["lr_decay"], weight_decay=group["weight_decay"], eps=group["eps"],
        maximize=group["maximize"],
    )  # fmt: skip


# The kernel of a class, and the number of lists of states that its _init_group fills.
_KERNELS: dict[type, tuple[Kernel, int]] = {
    torch.optim.Adam: (_adam, 4),
    torch.optim.AdamW: (_adam, 4),
    torch.optim.SGD: (_sgd, 1),
    torch.optim.Adagrad: (_adagrad, 2),
}

# Settings for a probe, and the weights after three steps.
_KNOWN_STEPS: dict[type, tuple[dict[str, Any], list[float]]] = {
    torch.optim.Adam: ({}, [0.2076817, -1.2347243]),
    torch.optim.AdamW: ({"weight_decay": 0.05}, [0.2016992, -1.2138002]),
    torch.optim.SGD: ({"momentum": 0.9}, [-0.451, -0.768]),
    torch.optim.Adagrad: ({}, [0.2303789, -1.3552786]),
}
