"""TorchDynamo: the operations of a function, the places of the tensors that it reads, and the guards.

``torch.compile`` is public; what it has found out about a function is not. There is no public way to it: where the
probe fails, steps are not compiled.
"""

import ast
import functools
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from trainwright._torch_compat.probing import check_close, fault_of

# Writing to objects that exist before the call would be done once, at the capture; a hook on a module be overlooked.
_STRICT = {"side_effect_replay_policy": "error", "skip_nnmodule_hook_guards": False}

Backend = Callable[[torch.fx.GraphModule, Any], Callable[..., Any]]


@functools.cache
def fault() -> str | None:
    """Why functions cannot be captured with this torch; None where they can."""
    return fault_of(probe)


def run_captured(
    function: Callable[..., Any], backend: Backend, tensors: Sequence[Any], *, may_write: bool = False
) -> Any:
    """What ``function(*tensors)`` gives, with its operations run by ``backend``.

    Raises whatever the compiler raises; see `written_sources` for a function that writes to an object that existed
    before the call, unless it ``may_write``.
    """
    config = {**_STRICT, "side_effect_replay_policy": "silent"} if may_write else {**_STRICT}
    # Messages that are logged once were logged in the eager step.
    once = {getattr(logging.Logger, name, None) for name in ("warning_once", "info_once")} - {None}
    dynamo: Any = torch._dynamo
    config["ignore_logging_functions"] = {*dynamo.config.ignore_logging_functions, *once}
    with dynamo.config.patch(**config), torch.enable_grad():
        return torch.compile(function, backend=backend, fullgraph=True, dynamic=False)(*tensors)


def guard_check(function: FunctionType) -> Callable[[Mapping[str, Any]], bool]:
    """Asks the guards of a captured function, given its local names, whether what was captured still holds."""
    entries = torch._dynamo.eval_frame._debug_get_cache_entry_list(function.__code__)
    check: Callable[[Mapping[str, Any]], bool] = entries[0].guard_manager.check
    return check


def argument_sources(graph: torch.fx.GraphModule) -> list[str]:
    """The Python expressions that the arguments of a captured graph come from. To be read inside of the backend."""
    names = [node.meta["grapharg"].source.name for node in graph.graph.nodes if node.op == "placeholder"]
    return [str(name() if callable(name) else name) for name in names]


def written_sources(error: BaseException) -> list[str] | None:
    """The expressions of the objects that a function writes to, from the error of its capture; None: another error."""
    lines = str(error).splitlines()
    found = re.search(r"certain side effects happened.*?(\[.*\])\s*$", lines[0]) if lines else None
    return None if found is None else [str(source) for source in ast.literal_eval(found[1])]


def probe() -> None:
    """Capture a function, run its operations, change what the guards watch, and capture one that writes."""
    layer = _Layer()
    function, scope = _double(layer)
    found: dict[str, Any] = {}

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        found["sources"] = argument_sources(graph)
        return graph.forward

    x = torch.tensor([1.0, 2.0], dtype=torch.float32, device="cpu")
    returned = run_captured(function, backend, [x])
    check_close("a captured function", returned.tolist(), [3.0, 6.0])
    names = {"L": {**scope, "x": x}, "G": function.__globals__}
    tensors = [eval(source, names) for source in found["sources"]]
    assert {*map(id, tensors)} == {id(x), id(layer.weight)}, f"the arguments come from {found['sources']}"
    check = guard_check(function)
    assert check(names["L"]), "the guards of a captured function do not hold"
    layer.factor = 5.0
    assert not check(names["L"]), "the guards do not notice a change"
    layer.factor = 3.0
    assert check(names["L"]), "the guards do not hold again"

    function, _ = _double(layer, writes=True)
    sources: list[str] | None = None
    try:
        run_captured(function, backend, [x])
    except Exception as error:
        sources = written_sources(error)
    assert sources, "a function that writes to an object is captured"
    run_captured(function, backend, [x], may_write=True)


class _Layer:
    def __init__(self) -> None:
        self.factor = 3.0
        self.weight = torch.ones(2, dtype=torch.float32, device="cpu")
        self.calls = 0


def _double(layer: _Layer, *, writes: bool = False) -> tuple[FunctionType, dict[str, Any]]:
    """A function with code of its own, by which Dynamo keeps what it has captured, and its free names."""

    def plain(x: Tensor) -> Tensor:
        return x * layer.weight * layer.factor

    def writing(x: Tensor) -> Tensor:
        layer.calls += 1
        return x * layer.weight

    function: Any = writing if writes else plain
    code = function.__code__.replace(co_name=f"probe_{id(layer)}")
    return FunctionType(code, {**globals()}, code.co_name, None, function.__closure__), {"layer": layer}
