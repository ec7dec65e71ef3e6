"""torch's optimizers as operations of a program.

The arithmetic is torch's: its ``step`` is run once on stand-ins of parameters and states, and what it does is written
down. That is its "capturable" kind, which asks no tensor for its value. It works on the states that the fused and the
plain kinds keep, so a run may change between program and eager at any step.
"""

import inspect
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer
from torch.overrides import TorchFunctionMode

from trainwright.engine.graph_errors import NotCapturable, NotReady

# Of a group: what changes along a schedule, or is of no meaning to the step.
_NOT_SETTINGS = ("params", "lr", "initial_lr", "max_lr", "min_lr", "swa_lr", "param_names", "fused", "foreach")


def refusal(optimizer: Optimizer) -> str | None:
    """Why the steps of ``optimizer`` cannot be part of a program; None where they can."""
    kind = type(optimizer)
    torchs: Any = next(base for base in kind.__mro__ if base.__module__.startswith("torch.optim"))
    if torchs is Optimizer or kind.step is not torchs.step:
        return f"the optimizer {kind.__name__} has a step of its own; programs know those of torch.optim"
    own: Any = optimizer
    hooks = (own._optimizer_step_pre_hooks, own._optimizer_step_post_hooks)
    everywhere = (torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks)
    if any(hooks) or any(everywhere):
        return f"the optimizer {kind.__name__} has hooks around its step"
    step = vars(optimizer).get("step")
    if step is not None and getattr(step, "__wrapped__", None) is not kind.step:
        return f"somebody has put another step in place of that of the optimizer {kind.__name__}"
    closure = inspect.signature(kind.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        return f"the step of the optimizer {kind.__name__} needs a closure"
    return None


def has_state(optimizer: Optimizer) -> bool:
    """Whether a step has been made, in which the optimizer makes what it keeps; True where it keeps nothing."""
    return bool(optimizer.state) or all(group.get("momentum") == 0 for group in optimizer.param_groups)


class OptimizerInputs:
    """What a program takes of an optimizer: its states, as they are kept, and the learning rates of its groups.

    Attributes:
        parameters: all of them, in the order of the groups.
        keys: the names of the tensors in the state of each parameter.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.parameters: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
        self._settings_of = [_settings_getter(group) for group in optimizer.param_groups]
        self._settings = self._settings_now()
        device = self.parameters[0].device
        # Rates in double precision: those of a float32 would differ from the eager step's in the last bits.
        self.rates = [torch.zeros((), dtype=torch.float64, device=device) for _ in optimizer.param_groups]
        self._known_rates: list[Any] = [None for _ in self.rates]
        self.states, self.keys = self._collect()
        self._forms = _forms(self.states)

    def tensors(self) -> list[Tensor] | None:
        """States and rates as they are now; None where the program was made for others."""
        optimizer = self._optimizer
        if self._settings_now() != self._settings:
            return None
        # A state that was loaded is one of other tensors, for the same program.
        known = self._kept
        if (
            optimizer.state is not self._state
            or len(self._state) != self._num_states
            or any(state.get(key) is not tensor for state, key, tensor in known)
        ):
            states, keys = self._collect()
            if keys != self.keys or _forms(states) != self._forms:
                return None
            self.states = states
        for index, group in enumerate(optimizer.param_groups):
            rate = group["lr"]
            if isinstance(rate, Tensor):
                self.rates[index].copy_(rate)
            elif rate != self._known_rates[index]:
                self.rates[index].fill_(rate)
                self._known_rates[index] = rate
        return [*self.states, *self.rates]

    def _collect(self) -> tuple[list[Tensor], list[list[str]]]:
        state: Any = self._optimizer.state
        self._state, self._num_states = state, len(state)
        of_each = [state.get(p, {}) for p in self.parameters]
        keys = [[key for key, value in one.items() if isinstance(value, Tensor)] for one in of_each]
        self._kept = [(one, key, one[key]) for one, names in zip(of_each, keys, strict=True) for key in names]
        return [tensor for _, _, tensor in self._kept], keys

    def _settings_now(self) -> list[Any]:
        groups = self._optimizer.param_groups
        if len(groups) != len(self._settings_of):
            return []
        return [
            (len(group["params"]), settings_of(group))
            for group, settings_of in zip(groups, self._settings_of, strict=True)
        ]


def step_written_down(
    optimizer: Optimizer,
    inputs: OptimizerInputs,
    stand_ins: Sequence[Any],
    states: Sequence[Tensor],
    rates: Sequence[Tensor],
) -> None:
    """Run the step of ``optimizer`` on ``stand_ins`` of its parameters, which have gradients, and of its states.

    Raises:
        NotReady: it has made states that are not among these.
        NotCapturable: it counts in Python.
    """
    shadow: Any = object.__new__(type(optimizer))
    vars(shadow).update(vars(optimizer))
    of_each = _states_of_stand_ins(optimizer, inputs, states)
    counts = [_wide_counts(one) for one in of_each]
    shadow.state = defaultdict(dict, zip(stand_ins, of_each, strict=True))
    shadow.param_groups = _groups_of_stand_ins(optimizer, stand_ins, rates)
    before = [_plain(one) for one in (*of_each, *shadow.param_groups)]
    _run_step(shadow)
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


def clipping_groups(optimizer: Optimizer, stand_ins: Sequence[Any]) -> Optimizer:
    """Something with the groups of ``optimizer`` over ``stand_ins``, for those who read groups alone."""
    shadow: Any = object.__new__(type(optimizer))
    shadow.param_groups = _groups_of_stand_ins(optimizer, stand_ins, [])
    found: Optimizer = shadow
    return found


def _states_of_stand_ins(
    optimizer: Optimizer, inputs: OptimizerInputs, states: Sequence[Tensor]
) -> list[dict[str, Any]]:
    flat, of_each = iter(states), []
    for parameter, keys in zip(inputs.parameters, inputs.keys, strict=True):
        known: Mapping[str, Any] = optimizer.state.get(parameter, {})
        of_each.append({**known, **{key: next(flat) for key in keys}})
    return of_each


def _wide_counts(state: dict[str, Any]) -> dict[str, Tensor]:
    """Count the steps in double precision, as the eager step does; ``beta ** step`` in float32 differs in the fifth
    digit of the first updates. The dictionary gets them, too."""
    step = state.get("step")
    if not isinstance(step, Tensor) or step.dtype is not torch.float32:
        return {}
    state["step"] = step.double()
    return {"step": state["step"]}


def _groups_of_stand_ins(
    optimizer: Optimizer, stand_ins: Sequence[Any], rates: Sequence[Tensor]
) -> list[dict[str, Any]]:
    flat, groups = iter(stand_ins), []
    # On CUDA one kernel of many tensors is launched; on a CPU the compiler makes of each kind what it will.
    is_foreach = next(p for group in optimizer.param_groups for p in group["params"]).is_cuda
    for index, group in enumerate(optimizer.param_groups):
        changed = {**group, "params": [next(flat) for _ in group["params"]], "fused": False, "foreach": is_foreach}
        if "capturable" in group:
            changed["capturable"] = True
        if rates:
            changed["lr"] = rates[index]
        groups.append(changed)
    return groups


def _run_step(shadow: Any) -> None:
    was_compiling = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True  # torch's own steps then leave out what looks at values
    try:
        with _NumbersMayBeTensors():
            inspect.unwrap(type(shadow).step)(shadow)
    finally:
        torch.compiler._is_compiling_flag = was_compiling


class _NumbersMayBeTensors(TorchFunctionMode):
    """``add(x, y, alpha=rate)`` and the like of a rate that is a tensor, without asking it for its value."""

    def __torch_function__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for name in ("alpha", "value"):
            if isinstance(kwargs.get(name), Tensor):
                factor = kwargs[name]
                kwargs = {key: value for key, value in kwargs.items() if key != name}
                first, second, *others = args
                scaled = torch._foreach_mul(second, factor) if isinstance(second, list | tuple) else second * factor
                args = (first, scaled, *others)
        return function(*args, **kwargs)


def _settings_getter(group: Mapping[str, Any]) -> Any:
    names = [name for name in group if name not in _NOT_SETTINGS]
    return itemgetter(*names) if names else lambda group: ()


def _forms(tensors: Iterable[Tensor]) -> list[Any]:
    return [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]


def _plain(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state.items() if not isinstance(value, Tensor) and key != "params"}
