"""torch's optimizers as operations of a program.

The arithmetic is torch's: its ``step`` runs once on fake parameters and states, and is traced. The trace uses the
"capturable" variant, which reads no tensor's value. It uses the states of the fused and the plain variants, so a run
may switch between program and eager at any step.
"""

import inspect
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from operator import call, is_, itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from trainwright._torch_compat.optimizer_import import steps_as
from trainwright.base.signatures import read_signature
from trainwright.graph.capture import NotCapturable, NotReady
from trainwright.graph.traced_step import HOOKS, LATE_HOOKS, has_gradient_hooks, is_torchs, run_step, step_hooks
from trainwright.optim.named import each_optimizer

_PARAMS = itemgetter("params")

# Settings of a group that change along a schedule, or do not affect the step.
_NOT_SETTINGS = ("params", "lr", "initial_lr", "max_lr", "min_lr", "swa_lr", "param_names", "fused", "foreach")


_MOST_PARAMETERS = 32  # of more, the step takes as long to compile as the rest, and is no faster in the program


def refusal(optimizer: Optimizer) -> str | None:
    """Why no program can compute the gradients of ``optimizer``; None if one can."""
    if has_gradient_hooks(_parameters_of(optimizer)):
        return "a parameter has a hook on its gradient, which exists only inside a program"
    closure = read_signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        return f"the step of the optimizer {type(optimizer).__name__} needs a closure"
    return None


def reason_outside(optimizer: Optimizer) -> str | None:
    """Why the steps of ``optimizer`` are not part of a program, but eager; None if they are part of it."""
    if len(each_optimizer(optimizer)) > 1:
        return "is of several optimizers"
    kind = type(optimizer)
    torchs: Any = next(base for base in kind.__mro__ if base.__module__.startswith("torch.optim"))
    if torchs is Optimizer or kind.step is not torchs.step:
        return "is not one of torch.optim"
    if any(step_hooks(optimizer)):
        return "has hooks"
    if kind.zero_grad is not Optimizer.zero_grad or "zero_grad" in vars(optimizer):
        return "has a zero_grad of its own"
    if not steps_as(kind.step, optimizer) or not is_torchs(kind.step):
        return "has been replaced"
    if any("base_momentum" in group for group in optimizer.param_groups):  # of torch's OneCycleLR and CyclicLR
        return "has settings that change"
    if (number := len(_parameters_of(optimizer))) > _MOST_PARAMETERS:
        return f"for {number} parameters takes long to compile"
    return None


def has_state(optimizer: Optimizer) -> bool:
    """Whether the optimizer has created its state, or keeps none."""
    return bool(optimizer.state) or all(group.get("momentum") == 0 for group in optimizer.param_groups)


_Kept = tuple[str, dict[str, Any], Tensor]  # a name, the state of a parameter, and its value of this name


class TrainedParameters:
    """The parameters of an optimizer whose steps are not part of the program.

    Attributes:
        parameters: all of them, in the order of the groups.
        rates: the learning rates that are inputs of the program.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.parameters = _parameters_of(optimizer)
        self.rates: list[Tensor] = []

    def tensors(self) -> list[Tensor] | None:
        """The inputs of the program; None if it does not apply to the optimizer."""
        groups = self._optimizer.param_groups
        number = sum(map(len, map(_PARAMS, groups)))
        is_same = number == len(self.parameters) and all(
            map(is_, chain.from_iterable(map(_PARAMS, groups)), self.parameters)
        )
        return [] if is_same and not has_gradient_hooks(self.parameters) else None


class OptimizerInputs(TrainedParameters):
    """The inputs of a program from an optimizer: its states, and the learning rates of its groups.

    Attributes:
        keys: the names of the tensors in the state of each parameter.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        self._step_hooks, self._class_step = step_hooks(optimizer), type(optimizer).step
        self._own_step = vars(optimizer).get("step")  # that of a scheduler of torch, or none
        self._settings_of = [_settings_getter(group) for group in optimizer.param_groups]
        self._settings = [*map(call, self._settings_of, optimizer.param_groups)]
        self._sizes = [*map(len, map(_PARAMS, optimizer.param_groups))]
        device = self.parameters[0].device
        # Rates in double precision: with float32 the last bits would differ from the eager step.
        self.rates = [torch.zeros((), dtype=torch.float64, device=device) for _ in optimizer.param_groups]
        self._known_rates: list[Any] = [None for _ in self.rates]
        self._owners, self._of_each = list[Any](), list[Any]()
        self.keys = [[key for key, _, _ in one] for one in self._states_of_each()]
        self._keep(self._states_of_each())
        self._forms = _forms(self.states)

    def tensors(self) -> list[Tensor] | None:
        """The current states and rates; None: the program is not that of the optimizer any more."""
        if not self._has_same_step():
            return None
        if not self._has_known_states():
            # A loaded state has other tensors, for the same program.
            found = self._states_of_each()
            same_keys = [[key for key, _, _ in one] for one in found] == self.keys
            if not same_keys or _forms(tensor for one in found for _, _, tensor in one) != self._forms:
                return None
            self._keep(found)
        for index, group in enumerate(self._optimizer.param_groups):
            rate = group["lr"]
            if isinstance(rate, Tensor):
                self.rates[index].copy_(rate)
            elif rate != self._known_rates[index]:
                self.rates[index].fill_(rate)
                self._known_rates[index] = rate
        return [*self.states, *self.rates]

    def _has_same_step(self) -> bool:
        """Whether the optimizer steps the same parameters, with the same settings and no further code."""
        optimizer, groups = self._optimizer, self._optimizer.param_groups
        return (
            [*map(len, map(_PARAMS, groups))] == self._sizes
            and all(map(is_, chain.from_iterable(map(_PARAMS, groups)), self.parameters))
            and [*map(call, self._settings_of, groups)] == self._settings
            and not any(self._step_hooks)
            and type(optimizer).step is self._class_step
            and vars(optimizer).get("step") is self._own_step
            and not any(map(HOOKS, self.parameters))
            and not any(map(LATE_HOOKS, self.parameters))
        )

    def _has_known_states(self) -> bool:
        state = self._optimizer.state
        return (
            len(state) == len(self._owners)
            and all(map(is_, state, self._owners))
            and all(map(is_, state.values(), self._of_each))
            and all(map(is_, map(dict.get, self._state_of_each, self._key_of_each), self.states))
        )

    def _keep(self, states: "list[list[_Kept]]") -> None:
        state: Any = self._optimizer.state
        self._owners, self._of_each = [*state], [*state.values()]
        kept = [*chain.from_iterable(states)]
        self._key_of_each, self._state_of_each = [key for key, _, _ in kept], [state for _, state, _ in kept]
        self.states = [tensor for _, _, tensor in kept]

    def _states_of_each(self) -> "list[list[_Kept]]":
        state: Any = self._optimizer.state
        found = []
        for parameter in self.parameters:
            one = state.get(parameter, {})
            found.append([(key, one, value) for key, value in one.items() if isinstance(value, Tensor)])
        return found


def trace_step(
    optimizer: Optimizer,
    inputs: OptimizerInputs,
    fakes: Sequence[Any],
    states: Sequence[Tensor],
    rates: Sequence[Tensor],
) -> None:
    """Run the step of ``optimizer`` on fake parameters ``fakes``, which have gradients, and on its states.

    Raises:
        NotReady: it has created further states.
        NotCapturable: it counts in Python.
    """
    shadow: Any = object.__new__(type(optimizer))
    vars(shadow).update(vars(optimizer))
    of_each = _fake_states(optimizer, inputs, states)
    counts = [_wide_counts(one) for one in of_each]
    shadow.state = defaultdict(dict, zip(fakes, of_each, strict=True))
    shadow.param_groups = _fake_groups(optimizer, fakes, rates)
    before = [_plain(one) for one in (*of_each, *shadow.param_groups)]
    with _NumbersMayBeTensors():
        run_step(shadow)  # torch's steps then read no values
    for one, keys in zip(of_each, inputs.keys, strict=True):
        if [key for key, value in one.items() if isinstance(value, Tensor)] != keys:
            raise NotReady
    if before != [_plain(one) for one in (*of_each, *shadow.param_groups)]:
        raise NotCapturable(f"the optimizer {type(optimizer).__name__} counts in Python numbers")
    flat = iter(states)
    for one, keys, wide in zip(of_each, inputs.keys, counts, strict=True):
        for key in keys:
            kept, now = next(flat), one[key]
            if now is not kept:
                kept.copy_(wide.get(key, now))


def clipping_groups(optimizer: Optimizer, fakes: Sequence[Any]) -> Optimizer:
    """An object with the groups of ``optimizer`` over ``fakes``, for code that reads only the groups."""
    shadow: Any = object.__new__(type(optimizer))
    shadow.param_groups = _fake_groups(optimizer, fakes, [])
    found: Optimizer = shadow
    return found


def _fake_states(optimizer: Optimizer, inputs: OptimizerInputs, states: Sequence[Tensor]) -> list[dict[str, Any]]:
    flat, of_each = iter(states), []
    for parameter, keys in zip(inputs.parameters, inputs.keys, strict=True):
        known: Mapping[str, Any] = optimizer.state.get(parameter, {})
        of_each.append({**known, **{key: next(flat) for key in keys}})
    return of_each


def _wide_counts(state: dict[str, Any]) -> dict[str, Tensor]:
    """Count the steps in double precision, as the eager step does; ``beta ** step`` in float32 differs in the fifth
    digit of the first updates. Also updates ``state``."""
    step = state.get("step")
    if not isinstance(step, Tensor) or step.dtype is not torch.float32:
        return {}
    state["step"] = step.double()
    return {"step": state["step"]}


def _fake_groups(optimizer: Optimizer, fakes: Sequence[Any], rates: Sequence[Tensor]) -> list[dict[str, Any]]:
    flat, groups = iter(fakes), []
    # CUDA launches one kernel for many tensors; on a CPU the compiler fuses the operations.
    is_foreach = next(p for group in optimizer.param_groups for p in group["params"]).is_cuda
    for index, group in enumerate(optimizer.param_groups):
        changed = {**group, "params": [next(flat) for _ in group["params"]], "fused": False, "foreach": is_foreach}
        if "capturable" in group:
            changed["capturable"] = True
        if rates:
            changed["lr"] = rates[index]
        groups.append(changed)
    return groups


class _NumbersMayBeTensors(TorchFunctionMode):
    """Allows tensor rates in ``add(x, y, alpha=rate)`` and similar calls without reading their value."""

    def __torch_function__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for name in ("alpha", "value"):
            if isinstance(kwargs.get(name), Tensor):
                factor = kwargs[name]
                kwargs = {key: value for key, value in kwargs.items() if key != name}
                first, second, *others = args
                scaled = [value * factor for value in second] if isinstance(second, list | tuple) else second * factor
                args = (first, scaled, *others)
        return function(*args, **kwargs)


def _parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [*chain.from_iterable(map(_PARAMS, optimizer.param_groups))]


def _settings_getter(group: Mapping[str, Any]) -> Any:
    names = [name for name in group if name not in _NOT_SETTINGS]
    return itemgetter(*names) if names else lambda group: ()


def _forms(tensors: Iterable[Tensor]) -> list[Any]:
    return [(tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for tensor in tensors]


def _plain(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state.items() if not isinstance(value, Tensor) and key != "params"}
