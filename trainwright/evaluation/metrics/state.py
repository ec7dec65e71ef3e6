"""A torchmetrics metric's memory as plain values: taken, put back, and joined over ranks.

torchmetrics joins ranks by itself only where every rank has made its metric and seen a batch; here one may have none.
"""

from collections.abc import Iterator, Sequence
from typing import Any  # torchmetrics' own states: tensors and lists of tensors

import torch
from torch import Tensor

State = dict[str, dict[str, Any]]  # by the path of the metric inside its wrappers; "" is the metric itself

_PLAIN = (bool, int, float, str, type(None))
_KEPT_PRIVATE = ("_update_count", "_num_vals_seen")


def take_state(metric: Any) -> State:
    """Everything that a metric has counted. Tensors are copies, on the CPU."""
    return {
        path: {
            "states": {name: _copied(getattr(part, name)) for name in part._defaults},
            "attributes": {
                name: _copied(value)
                for name, value in vars(part).items()
                if name not in part._defaults and _is_attribute(name, value)
            },
        }
        for path, part in _parts(metric)
    }


def put_state(metric: Any, state: State) -> None:
    """The inverse of `take_state`, into a metric that was made with the same arguments. It stays on its device."""
    device = metric.device
    for path, part in _parts(metric):
        for name, value in {**state[path]["states"], **state[path]["attributes"]}.items():
            setattr(part, name, _copied(value))
        part._computed = None
    metric.to(device)


def put_joined_states(metric: Any, states: Sequence[State]) -> None:
    """Put what several ranks have counted into a fresh metric, as torchmetrics does when it joins ranks."""
    put_state(metric, states[0])
    if len(states) == 1:
        return
    for path, part in _parts(metric):
        for name, reduction in part._reductions.items():
            setattr(part, name, _joined([state[path]["states"][name] for state in states], reduction))
        part._update_count = sum(state[path]["attributes"]["_update_count"] for state in states)


def _joined(values: list[Any], reduction: Any) -> Any:
    if isinstance(values[0], Tensor):
        stacked = torch.stack(values)
        return stacked if reduction is None else reduction(stacked)
    return [item for value in values for item in value]


def _parts(metric: Any) -> Iterator[tuple[str, Any]]:
    for path, part in metric.named_modules():
        if hasattr(part, "_reductions"):
            yield path, part


def _is_attribute(name: str, value: Any) -> bool:
    """A value that a metric notes beside its states, such as the smallest result of a MinMaxMetric."""
    kept = not name.startswith("_") or name in _KEPT_PRIVATE
    return kept and type(value) in (*_PLAIN, Tensor)


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()
    return [_copied(item) for item in value] if isinstance(value, list) else value
