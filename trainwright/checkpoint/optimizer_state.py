"""An optimizer's state with the names of its parameters, for a resume with another order or another layout.

torch numbers the parameters of an optimizer. A numbered state fits only the same parameters in the same order.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from trainwright.checkpoint.errors import CheckpointError
from trainwright.checkpoint.weights import group_names, unwrap

NAMES = "names"  # in a numbered state: the name of each parameter, by number
TIED = "tied"  # in a state: {another name of a parameter: the name in this state}


def with_names(state: Any, optimizer: Optimizer, model: nn.Module) -> Any:
    """``state`` of the optimizer and the names of its parameters; unchanged if its parameters have no numbers."""
    names, tied = _names(optimizer, model)
    if not isinstance(state, dict) or _numbers(state) != list(range(len(names))):
        return state
    return {**state, NAMES: names, **({TIED: tied} if tied else {})}


def has_other_order(state: Any, optimizer: Any, model: nn.Module) -> bool:
    """Whether a state of :func:`with_names` has the parameters, and so perhaps the groups, in another order."""
    is_named = isinstance(optimizer, Optimizer) and isinstance(state, Mapping) and NAMES in state
    return is_named and state[NAMES] != _names(optimizer, model)[0]


def by_name(state: Mapping[str, Any]) -> dict[str, Any]:
    """A numbered state from :func:`with_names` with names in the place of the numbers.

    Raises:
        CheckpointError: it has no names.
    """
    if NAMES not in state:
        raise CheckpointError(
            "optimizer: its state has no names of parameters: it was saved by an older version, or the class of the"
            " optimizer has a state of its own format. It can only be loaded by the same number of processes with the"
            " same layout."
        )
    names = state[NAMES]
    groups = [{**group, "params": [names[number] for number in group["params"]]} for group in state["param_groups"]]
    states = {names[number]: values for number, values in state["state"].items()}
    return {**{key: value for key, value in state.items() if key != NAMES}, "state": states, "param_groups": groups}


def numbered(
    state: Any,
    optimizer: Optimizer,
    model: nn.Module,
    *,
    is_part: bool = False,
    read: Callable[[Any, Any], Any] | None = None,
) -> Any:
    """The state that ``optimizer.load_state_dict`` takes, from one of :func:`with_names` or :func:`by_name`.

    Args:
        is_part: the optimizer may have fewer parameters than the state.
        read: called with each saved value and its parameter; returns the value to load.

    Raises:
        CheckpointError: the optimizer has other parameters.
    """
    if not isinstance(state, Mapping) or "param_groups" not in state:
        return state
    names, tied = _names(optimizer, model)
    saved = state.get(NAMES)
    is_by_name = saved is None and any(isinstance(name, str) for name in _numbers(state))
    is_same_order = saved == names or (saved is None and not is_by_name)
    has_other_number = saved is not None and len(saved) != len(names)  # the optimizer's own load says which group
    if read is None and (is_same_order or (has_other_number and not is_part)):
        return {key: value for key, value in state.items() if key not in (NAMES, TIED)}
    named = state if is_by_name else by_name(state)
    return _Renumbered(named, names, tied, is_part).state(optimizer, read)


class _Renumbered:
    """A state by name, and the names of the parameters that load it."""

    def __init__(self, state: Mapping[str, Any], names: list[str], tied: Mapping[str, str], is_part: bool) -> None:
        self._state, self._names = state, names
        self._groups = {name: group for group in state["param_groups"] for name in group["params"]}
        others: dict[str, list[str]] = {}
        for other, first in (*tied.items(), *state.get(TIED, {}).items()):
            others.setdefault(first, []).append(other)
            others.setdefault(other, []).append(first)
        # One of several names of a tied parameter is enough.
        self._found = {
            name: found
            for name in names
            if (found := next((n for n in (name, *others.get(name, ())) if n in self._groups), None)) is not None
        }
        known = {*names, *tied}
        missing = [name for name in names if name not in self._found]
        unused = [name for name in self._groups if name not in known and name not in self._found.values()]
        if missing or (unused and not is_part):
            lines = [f"not in the checkpoint: {', '.join(group_names(missing))}"] if missing else []
            lines += [f"not in the optimizer: {', '.join(group_names(unused))}"] if unused and not is_part else []
            raise CheckpointError("\n  ".join(["the parameters of the optimizer are not those of the run.", *lines]))

    def state(self, optimizer: Optimizer, read: Callable[[Any, Any], Any] | None) -> dict[str, Any]:
        """As a numbered state of the optimizer."""
        groups, states, start = [], dict[int, dict[str, Any]](), 0
        for place, group in enumerate(optimizer.param_groups):
            end = start + len(group["params"])
            found = [self._found[name] for name in self._names[start:end]]
            groups.append({**self._settings(found, place), "params": list(range(start, end))})
            for number, (name, parameter) in enumerate(zip(found, group["params"], strict=True), start):
                if name in self._state["state"]:
                    values = self._state["state"][name]
                    states[number] = {
                        key: value if read is None else read(value, parameter) for key, value in values.items()
                    }
            start = end
        others = {key: value for key, value in self._state.items() if key != TIED}
        return {**others, "state": states, "param_groups": groups}

    def _settings(self, found: list[str], place: int) -> dict[str, Any]:
        """The saved learning rate and so on of a group with these parameters."""
        saved = self._state["param_groups"]
        places = {id(self._groups[name]): self._groups[name] for name in found}
        if len(places) > 1:
            raise CheckpointError(
                f"group {place} of the optimizer holds parameters that the checkpoint has in {len(places)} groups:"
                f" {', '.join(group_names(found)[:5])}. Use the same groups."
            )
        return next(iter(places.values()), saved[min(place, len(saved) - 1)])


def _numbers(state: Mapping[str, Any]) -> list[Any]:
    groups = state.get("param_groups")
    return [number for group in groups for number in group["params"]] if isinstance(groups, list) else [None]


def _names(optimizer: Optimizer, model: nn.Module) -> tuple[list[str], dict[str, str]]:
    """The names of the optimizer's parameters in order, and the further names of the model's tied ones.

    A parameter that the model does not hold is ``#<group>.<place>``.
    """
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, value in unwrap(model).state_dict(keep_vars=True).items():
        if (known := first.setdefault(id(value), name)) != name:
            tied[name] = known
    names = [
        first.get(id(parameter), f"#{number}.{place}")
        for number, group in enumerate(optimizer.param_groups)
        for place, parameter in enumerate(group["params"])
    ]
    return names, {other: name for other, name in tied.items() if name in names}
