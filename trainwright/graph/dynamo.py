"""TorchDynamo: the operations of a function, the sources of the tensors that it reads, and the guards.

``torch.compile`` is public; its results for a function are not. If the probe fails, steps are not compiled.
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

# The defaults write to existing objects only once, at the capture, and ignore hooks on modules.
_STRICT = {"side_effect_replay_policy": "error", "skip_nnmodule_hook_guards": False}

# A default that takes tensors of a module for constants: torch 2.11 then does not notice that a parameter is frozen.
_FIXED = "skip_tensor_guards_with_matching_dict_tags"

Backend = Callable[[torch.fx.GraphModule, Any], Callable[..., Any]]


@functools.cache
def fault() -> str | None:
    """Why functions cannot be captured with this torch; None if they can."""
    return fault_of(probe)


def run_captured(
    function: Callable[..., Any], backend: Backend, tensors: Sequence[Any], *, may_write: bool = False
) -> Any:
    """The result of ``function(*tensors)``, with its operations run by ``backend``.

    Raises the errors of the compiler. Without ``may_write``, a function that writes to an object that existed before
    the call is an error (`written_sources`).
    """
    config = {**_STRICT, "side_effect_replay_policy": "silent"} if may_write else {**_STRICT}
    # Messages that are logged only once were logged in the eager step.
    once = {getattr(logging.Logger, name, None) for name in ("warning_once", "info_once")} - {None}
    dynamo: Any = torch._dynamo
    config["ignore_logging_functions"] = {*dynamo.config.ignore_logging_functions, *once}
    if hasattr(dynamo.config, _FIXED):
        config[_FIXED] = False
    with dynamo.config.patch(**config), torch.enable_grad():
        return torch.compile(function, backend=backend, fullgraph=True, dynamic=False)(*tensors)


def guard_check(function: FunctionType) -> Callable[[Mapping[str, Any]], bool]:
    """A function of the local names that checks the guards: whether the captured graph is still valid."""
    entries = torch._dynamo.eval_frame._debug_get_cache_entry_list(function.__code__)
    check: Callable[[Mapping[str, Any]], bool] = entries[0].guard_manager.check
    return check


def argument_sources(graph: torch.fx.GraphModule) -> list[str]:
    """The Python expressions of the arguments of a captured graph. Call it inside the backend."""
    names = [node.meta["grapharg"].source.name for node in graph.graph.nodes if node.op == "placeholder"]
    return [str(name() if callable(name) else name) for name in names]


def written_sources(error: BaseException) -> list[str]:
    """The expressions of the objects that a function writes to, from the error of its capture; [] for another."""
    lines = str(error).splitlines()
    found = re.search(r"certain side effects happened.*?(\[.*\])\s*$", lines[0]) if lines else None
    return [] if found is None else [str(source) for source in ast.literal_eval(found[1])]


def probe() -> None:
    """Capture a function, run its operations, change a guarded value, and capture a function that writes."""
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
    assert check(names["L"]), "the guards of a captured function fail"
    layer.factor = 5.0
    assert not check(names["L"]), "the guards do not detect a change"
    layer.factor = 3.0
    assert check(names["L"]), "the guards fail after the change is undone"

    model = torch.nn.Sequential(torch.nn.Linear(2, 2, device="cpu"), torch.nn.Linear(2, 1, device="cpu"))
    function, scope = _calling(model)
    run_captured(function, backend, [x])
    check, names["L"] = guard_check(function), {**scope, "x": x}
    assert all(check(names["L"]) for _ in range(3)), "the guards of a captured model fail"
    model[0].weight.requires_grad_(False)
    assert not check(names["L"]), "the guards do not detect a frozen parameter"

    function, _ = _double(layer, writes=True)
    sources: list[str] = []
    try:
        run_captured(function, backend, [x])
    except Exception as error:
        sources = written_sources(error)
    assert sources, "a write to an object is not detected"
    run_captured(function, backend, [x], may_write=True)


class _Layer:
    def __init__(self) -> None:
        self.factor = 3.0
        self.weight = torch.ones(2, dtype=torch.float32, device="cpu")
        self.calls = 0


def _calling(model: torch.nn.Module) -> tuple[FunctionType, dict[str, Any]]:
    """A function that calls the model, as `_double` makes them."""

    def call(x: Tensor) -> Tensor:
        result: Tensor = model(x)
        return result

    return _renamed(call, id(model)), {"model": model}


def _double(layer: _Layer, *, writes: bool = False) -> tuple[FunctionType, dict[str, Any]]:
    """A function with its own code object, which is the key of Dynamo's cache, and its free names."""

    def plain(x: Tensor) -> Tensor:
        return x * layer.weight * layer.factor

    def writing(x: Tensor) -> Tensor:
        layer.calls += 1
        return x * layer.weight

    return _renamed(writing if writes else plain, id(layer)), {"layer": layer}


def _renamed(function: Any, number: int) -> FunctionType:
    code = function.__code__.replace(co_name=f"probe_{number}")
    return FunctionType(code, {**globals()}, code.co_name, None, function.__closure__)
