"""An optimizer's state with the names of its parameters, for a resume with another order or another layout.

torch numbers the parameters of an optimizer. A numbered state fits only the same parameters in the same order.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from trainwright.checkpoint.errors import CheckpointError
from trainwright.checkpoint.weights import group_names
from trainwright.parallel.wrappers import model_state

NAMES = "names"  # in a numbered state: the name of each parameter, by number
TIED = "tied"  # in a state: {another name of a parameter: the name in this state}


def inner_optimizers(name: str, optimizer: Any) -> dict[str, Any]:
    """The optimizers that another one holds (SAM, for example), if its own state is not known to have theirs."""
    inner = {key: one for key, one in _held(name, optimizer).items() if one.state is not optimizer.state}
    return inner | {deeper: one for key, value in inner.items() for deeper, one in inner_optimizers(key, value).items()}


def sharing_state(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizers in another one that have the same ``state``: a load gives it a new one."""
    found = [optimizer]
    for outer in found:  # it grows
        inner = [one for one in _held("", outer).values() if one.state is optimizer.state]
        found += [one for one in inner if all(one is not other for other in found)]
    return found[1:]


def _held(name: str, optimizer: Any) -> dict[str, Optimizer]:
    """By name: those in attributes, and in lists and dictionaries that are attributes."""
    if not isinstance(optimizer, Optimizer) or type(optimizer).state_dict is not Optimizer.state_dict:
        return {}
    found: dict[str, Any] = {}
    for attribute, value in vars(optimizer).items():
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
        found[f"{name}_{attribute}"] = value
        found |= {f"{name}_{attribute}_{place}": part for place, part in enumerate(parts)}
    return {key: one for key, one in found.items() if isinstance(one, Optimizer)}


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
    """A numbered state from :func:`with_names` with names in the place of the numbers."""
    if NAMES not in state:
        raise CheckpointError(
            "optimizer: its state has no names of parameters: the class of the optimizer has a state of its own format."
            " It can only be loaded by the same number of processes with the same layout."
        )
    names = state[NAMES]
    groups = [{**group, "params": [names[number] for number in group["params"]]} for group in state["param_groups"]]
    states = {names[number]: values for number, values in state["state"].items()}
    return {**{key: value for key, value in state.items() if key != NAMES}, "state": states, "param_groups": groups}


def numbered(state: Any, optimizer: Optimizer, model: nn.Module, *, is_part: bool = False) -> Any:
    """The state that ``optimizer.load_state_dict`` takes, from one of :func:`with_names` or :func:`by_name`.

    ``is_part``: the optimizer may have fewer parameters than the state.
    """
    if not isinstance(state, Mapping) or "param_groups" not in state:
        return state
    names, tied = _names(optimizer, model)
    saved = state.get(NAMES)
    is_by_name = saved is None and any(isinstance(name, str) for name in _numbers(state))
    is_same_order = saved == names or (saved is None and not is_by_name)
    others = {key: value for key, value in state.items() if key not in (NAMES, TIED)}
    if is_same_order:
        return others
    named = state if is_by_name else by_name(state)
    group_of = {name: group for group in named["param_groups"] for name in group["params"]}
    found = _saved_names(names, tied, named.get(TIED, {}), group_of, is_part=is_part)
    groups, states, start = [], dict[int, Any](), 0
    for place, group in enumerate(optimizer.param_groups):
        end = start + len(group["params"])
        own = [found[name] for name in names[start:end]]
        groups.append({**_settings(own, place, named["param_groups"], group_of), "params": list(range(start, end))})
        states |= {number: named["state"][name] for number, name in enumerate(own, start) if name in named["state"]}
        start = end
    return {**others, "state": states, "param_groups": groups}


def _saved_names(
    names: list[str], tied: Mapping[str, str], saved_ties: Mapping[str, str], saved: Mapping[str, Any], *, is_part: bool
) -> dict[str, str]:
    """The name of each parameter in a state: one of several names of a tied parameter is enough."""
    others: dict[str, list[str]] = {}
    for other, first in (*tied.items(), *saved_ties.items()):
        others.setdefault(first, []).append(other)
        others.setdefault(other, []).append(first)
    candidates = {name: next((n for n in (name, *others.get(name, ())) if n in saved), None) for name in names}
    found = {name: candidate for name, candidate in candidates.items() if candidate is not None}
    missing = [name for name in names if name not in found]
    unused = [name for name in saved if name not in {*names, *tied, *found.values()} and not is_part]
    if unused and not missing:
        raise CheckpointError(
            f"the optimizer lacks parameters of the run: {', '.join(group_names(unused))}."
            "\n  Groups that add_param_group adds in a run: set `unfreeze` instead, or give the optimizer all"
            " parameters from the start and change their requires_grad. To resume this run, add the group before the"
            " trainer is built."
        )
    if missing or unused:
        lines = [f"not in the checkpoint: {', '.join(group_names(missing))}"] if missing else []
        lines += [f"not in the optimizer: {', '.join(group_names(unused))}"] if unused else []
        raise CheckpointError("\n  ".join(["the parameters of the optimizer are not those of the run.", *lines]))
    return found


def _settings(own: list[str], place: int, saved: list[Any], group_of: Mapping[str, Any]) -> dict[str, Any]:
    """The saved learning rate and so on of a group with these parameters."""
    groups = {id(group_of[name]): group_of[name] for name in own}
    if len(groups) > 1:
        raise CheckpointError(
            f"group {place} of the optimizer holds parameters that the checkpoint has in {len(groups)} groups:"
            f" {', '.join(group_names(own)[:5])}. Use the same groups."
        )
    return next(iter(groups.values()), saved[min(place, len(saved) - 1)])


def _numbers(state: Mapping[str, Any]) -> list[Any]:
    groups = state.get("param_groups")
    return [number for group in groups for number in group["params"]] if isinstance(groups, list) else [None]


def _names(optimizer: Optimizer, model: nn.Module) -> tuple[list[str], dict[str, str]]:
    """The names of the optimizer's parameters in order, and the further names of the model's tied ones.

    A parameter that the model does not hold is ``#<group>.<place>``.
    """
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, value in model_state(model, keep_vars=True).items():
        if (known := first.setdefault(id(value), name)) != name:
            tied[name] = known
    names = [
        first.get(id(parameter), f"#{number}.{place}")
        for number, group in enumerate(optimizer.param_groups)
        for place, parameter in enumerate(group["params"])
    ]
    return names, {other: name for other, name in tied.items() if name in names}
