"""The step of torch's fused optimizers without what surrounds their kernel.

For a tiny network ``optimizer.step()`` takes 25 us and its kernel 9: the rest is a label for the profiler, hooks that
are not set, and new lists of parameters, gradients and states. Here the lists are kept for as long as they are what
torch would make. The kernel and its arguments are torch's, so the result is the same to the last bit.
"""

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, repeat
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from trainwright._torch_compat.grad_mode import grad_switch
from trainwright._torch_compat.optimizer_import import PlainUpdate, is_torchs, mark_stepped, without_compiler
from trainwright._torch_compat.probing import check_close, is_usable

_ONE = torch.ones((), device="cpu")

Group = dict[str, Any]
# (group, parameters, gradients, the lists of states that torch's _init_group gives, in its order)
Kernel = Callable[[Group, list[Tensor], list[Tensor], Sequence[list[Tensor]]], None]


def direct(optimizer: Optimizer) -> "DirectUpdate | PlainUpdate":
    """An object with ``step`` and ``zero_grad`` of the optimizer, at less cost where that is possible."""
    kind = type(optimizer)
    parameter = next((p for group in optimizer.param_groups for p in group["params"]), None)
    has_kernel = kind in _KERNELS and is_torchs(kind.step)
    if has_kernel and parameter is not None and _is_usable(kind.__name__, parameter.device.type):
        return DirectUpdate(optimizer)
    return PlainUpdate(optimizer)


def probe(kind: type[Optimizer], device: str = "cpu") -> None:
    """Compare three direct steps of ``kind`` with the formula of its step, and see that a schedule notices them."""
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
    """Those around the step, of this optimizer and of all; the dictionaries are the same ones for good."""
    return [
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        torch_optimizer._global_optimizer_pre_hooks,
        torch_optimizer._global_optimizer_post_hooks,
    ]


class DirectUpdate(PlainUpdate):
    """Steps of torch's Adam, AdamW, SGD or Adagrad.

    ``optimizer.step`` is called for what is not plain: hooks on the optimizer, a replaced step of the object or of
    its class, a learning rate that is a tensor, parameters on several devices, settings other than
    fused. What changes between steps, such as groups, frozen parameters, and states that were loaded or reset, is
    noticed.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        if not is_torchs(self._class_step):
            self._class_step = None
        self._step_hooks = step_hooks(optimizer)
        self._set_grad_enabled = grad_switch()
        self._parts: list[_Part] = []
        self._kept: list[Any] = []  # all states and their owners as they were when the parts were made

    def step(self) -> None:
        """Change the weights by their gradients."""
        optimizer = self._optimizer
        if not self._is_untouched() or any(self._step_hooks):
            super().step()
            return
        gradients = self._gradients()
        if gradients is None:
            self._prepare()
            gradients = self._gradients()
        if gradients is None:
            super().step()
            return
        grad_was_enabled = torch.is_grad_enabled()
        self._set_grad_enabled(False)  # a block of torch.no_grad() takes as long as a small kernel
        try:
            for part, of_part in zip(self._parts, gradients, strict=True):
                part.kernel(part.group, part.parameters, of_part, part.states)
        finally:
            self._set_grad_enabled(grad_was_enabled)
        mark_stepped(optimizer)

    def _gradients(self) -> list[list[Any]] | None:
        """The gradients of each part; None where torch would not take now what the parts were made of."""
        groups, parts = self._optimizer.param_groups, self._parts
        states = _states(self._optimizer)
        if len(groups) != len(parts) or len(states) != len(self._kept) or not all(map(is_, states, self._kept)):
            return None
        gradients = []
        for group, part in zip(groups, parts, strict=True):
            of_part = [parameter.grad for parameter in part.parameters]
            params = group["params"]
            if (
                group is not part.group
                or len(params) != len(part.all_parameters)
                or not all(map(is_, params, part.all_parameters))
                or any(map(is_, of_part, repeat(None)))
                or any(parameter.grad is not None for parameter in part.others)
                or part.settings != _settings(group)
                or isinstance(group["lr"], Tensor)
            ):
                return None
            gradients.append(of_part)
        return gradients

    def _prepare(self) -> None:
        """Take the lists as torch makes them, with the states that are not there yet."""
        groups = self._optimizer.param_groups
        parts = [_Part(self._optimizer, group) for group in groups] if all(map(_is_fused, groups)) else []
        self._parts = parts if all(part.is_plain() for part in parts) else []
        self._kept = _states(self._optimizer)


class _Part:
    """What the kernel takes for one group."""

    def __init__(self, optimizer: Any, group: Group) -> None:
        self.group = group
        self.settings = _settings(group)
        self.kernel, num_states = _KERNELS[type(optimizer)]
        self.parameters: list[Tensor] = []
        self.states: list[list[Tensor]] = [[] for _ in range(num_states)]
        optimizer._init_group(group, self.parameters, [], *self.states)  # those with a gradient
        self.all_parameters: list[Tensor] = [*group["params"]]
        taken = {id(parameter) for parameter in self.parameters}
        self.others = [parameter for parameter in self.all_parameters if id(parameter) not in taken]

    def is_plain(self) -> bool:
        """Whether one call of the kernel does it."""
        kinds = {(parameter.device, parameter.dtype) for parameter in self.parameters}
        # SGD has no momentum before its first step, which torch makes.
        has_all = not any(map(is_, chain.from_iterable(self.states), repeat(None)))
        return len(kinds) == 1 and has_all and not any(p.grad is not None and p.grad.is_sparse for p in self.parameters)


def _settings(group: Group) -> tuple[Any, ...]:
    """What decides which lists there are."""
    return group["fused"], group.get("momentum", 0) != 0, group.get("amsgrad")


def _is_fused(group: Group) -> bool:
    is_simple = not (group.get("differentiable") or group.get("capturable"))
    return bool(group["fused"]) and is_simple and not any(isinstance(beta, Tensor) for beta in group.get("betas", ()))


def _states(optimizer: Any) -> list[Any]:
    """What they are made of, and whose they are."""
    return [*optimizer.state, *chain.from_iterable(map(dict.values, optimizer.state.values()))]


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
    """Add 1 to each. On a CPU torch makes a tensor of the 1 for each of them, which takes as long as the kernel."""
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


# The kernel of a class, and how many lists of states its _init_group fills.
_KERNELS: dict[type, tuple[Kernel, int]] = {
    torch.optim.Adam: (_adam, 4),
    torch.optim.AdamW: (_adam, 4),
    torch.optim.SGD: (_sgd, 1),
    torch.optim.Adagrad: (_adagrad, 2),
}

# Settings for a probe, and where three steps with them lead.
_KNOWN_STEPS: dict[type, tuple[dict[str, Any], list[float]]] = {
    torch.optim.Adam: ({}, [0.2076817, -1.2347243]),
    torch.optim.AdamW: ({"weight_decay": 0.05}, [0.2016992, -1.2138002]),
    torch.optim.SGD: ({"momentum": 0.9}, [-0.451, -0.768]),
    torch.optim.Adagrad: ({}, [0.2303789, -1.3552786]),
}
