"""Whatever becomes of the parts of torch that graph mode stands on, a training completes, eagerly, with one line."""

import functools
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import pytest
import torch

from tests._torch_compat.conftest import CHANGES, Trained, change_torch
from trainwright.graph import ahead_of_time, compile_graph, dynamo, traced_step

pytestmark = pytest.mark.usefixtures("compiler")
EAGER = "Graph mode: the steps stay eager: torch"


def test_todays_torch_is_as_expected() -> None:
    assert dynamo.fault() is None
    assert traced_step.fault() is None


def notices_all_but_frozen(check: Any = dynamo.guard_check) -> Any:
    return lambda function: check(function) if "layer" in function.__code__.co_freevars else bool


def raises(graph: Any) -> Any:
    raise KeyError("grapharg")


def without_flag(patch: pytest.MonkeyPatch, change: str) -> None:
    patch.setattr(torch.compiler, "_is_compiling_flag", torch.compiler._is_compiling_flag)
    change_torch(patch, traced_step, "compiler._is_compiling_flag", change, bool)


GUARDS, GUARD_CHECK, SOURCES = "_dynamo.eval_frame._debug_get_cache_entry_list", "guard_check", "argument_sources"
FAULTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], Any], str]] = {
    **{
        f"guards: {c}": (lambda patch, c=c: change_torch(patch, dynamo, GUARDS, c, lambda code: []), "")
        for c in CHANGES
    },
    "guards that notice nothing": (
        lambda patch: patch.setattr(dynamo, GUARD_CHECK, lambda function: lambda scope: True),
        "the guards do not detect a change",
    ),
    "guards that do not notice frozen parameters": (
        lambda patch: patch.setattr(dynamo, GUARD_CHECK, notices_all_but_frozen()),
        "the guards do not detect a frozen parameter",
    ),
    "no settings": (lambda patch: change_torch(patch, dynamo, "_dynamo.config", "missing", functools.partial), ""),
    "no compiler": (lambda patch: change_torch(patch, dynamo, "_dynamo", "missing", functools.partial), ""),
    "a capture that says nothing of what is written": (
        lambda patch: patch.setattr(dynamo, "_STRICT", {}),
        "a write to an object is not detected",
    ),
    "no sources of arguments": (lambda patch: patch.setattr(dynamo, SOURCES, raises), ""),
    "one source twice": (lambda patch: patch.setattr(dynamo, SOURCES, lambda graph: ["L['x']", "L['x']"]), ""),
    "another source": (lambda patch: patch.setattr(dynamo, SOURCES, lambda graph: ["nothing['x']", "L['x']"]), ""),
    "no flag of a compiler at work": (lambda patch: without_flag(patch, "missing"), ""),
    "a flag without effect": (lambda patch: without_flag(patch, "error"), ""),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_leaves_the_steps_eager(name: str, monkeypatch: pytest.MonkeyPatch, lines_of_training: Trained) -> None:
    change, why = FAULTS[name]
    change(monkeypatch)
    (line,) = lines_of_training(graph=True)
    assert line.startswith(EAGER)
    assert why in line


@pytest.mark.parametrize("name", ["HOOKS", "LATE_HOOKS"])
def test_the_hooks_on_gradients(name: str, monkeypatch: pytest.MonkeyPatch, lines_of_training: Trained) -> None:
    for other in (attrgetter("_no_such_thing"), lambda parameter: None):
        monkeypatch.setattr(traced_step, name, other)
        traced_step.fault.cache_clear()
        (line,) = lines_of_training(graph=True)
        assert line.startswith(EAGER)


def another(graph: Any, flat: Any, options: Any) -> Any:
    return lambda *inputs: [output + 1 for output in graph(*inputs)]


@pytest.mark.exhaustive(every=8)
@pytest.mark.parametrize("change", CHANGES)
def test_the_compiler_of_graphs(change: str, monkeypatch: pytest.MonkeyPatch, lines_of_training: Trained) -> None:
    monkeypatch.setattr("trainwright.graph.program.ahead_of_time", lambda *_: None)
    change_torch(monkeypatch, compile_graph, "_inductor.compile", change, another)
    (line,) = lines_of_training(graph=True)
    assert line.startswith("Graph mode: the steps stay eager: the backend 'inductor' failed")


def test_a_program_that_computes_something_else_is_not_taken() -> None:
    x = torch.tensor([1.0, 2.0], dtype=torch.float32)
    graph = torch.fx.symbolic_trace(lambda x: [x * 2])
    compile_graph.check(lambda inputs: [inputs[0] * 2.0000001], graph, [x])
    for other in (lambda x: [x * 3], lambda x: [x.double() * 2], lambda x: [x * 2, x], lambda x: [x[:1] * 2]):
        with pytest.raises((ArithmeticError, ValueError)):
            compile_graph.check(lambda inputs, other=other: other(*inputs), graph, [x])
    assert x.tolist() == [1.0, 2.0]


def as_it_is(graph: Any, flat: Any, options: Any) -> Any:
    return graph


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["aoti_compile_and_package", "aoti_load_package"])
@pytest.mark.exhaustive(every=4)
def test_compiling_ahead_of_time(
    name: str, change: str, monkeypatch: pytest.MonkeyPatch, lines_of_training: Trained, tmp_path: Any
) -> None:
    """The program is called from Python then."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    if name == "aoti_load_package":
        monkeypatch.setattr(ahead_of_time, "_compile", lambda *_: None)
    change_torch(monkeypatch, compile_graph, "_inductor.compile", "other result", as_it_is)
    change_torch(monkeypatch, ahead_of_time, f"_inductor.{name}", change, lambda *args, **kwargs: str(tmp_path / "no"))
    refused, made = lines_of_training(graph=True, is_equal=False, optimizer="sgd")
    assert refused.startswith("Graph mode: the program is called from Python")
    assert made.startswith("Graph mode: forward, backward and the step of SGD are one program")
