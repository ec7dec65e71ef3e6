"""Whatever becomes of the parts of torch that graph mode stands on, a training completes, eagerly, with one line."""

import functools
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


@pytest.mark.parametrize("change", CHANGES)
def test_the_guards(change: str, monkeypatch: pytest.MonkeyPatch, lines_of_training: Trained) -> None:
    path = "_dynamo.eval_frame._debug_get_cache_entry_list"
    change_torch(monkeypatch, dynamo, path, change, lambda code: [])
    (line,) = lines_of_training(graph=True)
    assert line.startswith(EAGER)


def test_guards_that_notice_nothing(monkeypatch: pytest.MonkeyPatch, lines_of_training: Trained) -> None:
    monkeypatch.setattr(dynamo, "guard_check", lambda function: lambda scope: True)
    (line,) = lines_of_training(graph=True)
    assert "the guards do not detect a change" in line


def test_guards_that_do_not_notice_frozen_parameters(
    monkeypatch: pytest.MonkeyPatch, lines_of_training: Trained
) -> None:
    check = dynamo.guard_check
    monkeypatch.setattr(
        dynamo,
        "guard_check",
        lambda function: check(function) if "layer" in function.__code__.co_freevars else bool,
    )
    (line,) = lines_of_training(graph=True)
    assert "the guards do not detect a frozen parameter" in line


@pytest.mark.parametrize("path", ["_dynamo.config", "_dynamo"])
def test_the_settings_of_the_compiler(path: str, monkeypatch: pytest.MonkeyPatch, lines_of_training: Trained) -> None:
    change_torch(monkeypatch, dynamo, path, "missing", functools.partial)
    (line,) = lines_of_training(graph=True)
    assert line.startswith(EAGER)


def test_a_capture_that_says_nothing_of_what_is_written(
    monkeypatch: pytest.MonkeyPatch, lines_of_training: Trained
) -> None:
    monkeypatch.setattr(dynamo, "_STRICT", {})
    (line,) = lines_of_training(graph=True)
    assert "a write to an object is not detected" in line


@pytest.mark.parametrize("sources", [KeyError("grapharg"), ["L['x']", "L['x']"], ["nothing['x']", "L['x']"]])
def test_where_arguments_come_from(sources: Any, monkeypatch: pytest.MonkeyPatch, lines_of_training: Trained) -> None:
    def other(graph: Any) -> Any:
        if isinstance(sources, Exception):
            raise sources
        return sources

    monkeypatch.setattr(dynamo, "argument_sources", other)
    (line,) = lines_of_training(graph=True)
    assert line.startswith(EAGER)


@pytest.mark.parametrize("change", ["missing", "no effect"])
def test_the_flag_of_a_compiler_at_work(
    change: str, monkeypatch: pytest.MonkeyPatch, lines_of_training: Trained
) -> None:
    path, kind = "compiler._is_compiling_flag", "missing" if change == "missing" else "error"
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", torch.compiler._is_compiling_flag)
    change_torch(monkeypatch, traced_step, path, kind, bool)
    (line,) = lines_of_training(graph=True)
    assert line.startswith(EAGER)


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


@pytest.mark.exhaustive
def test_the_factor_of_an_addition_is_computed() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    def function(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> list[torch.Tensor]:
        return [torch.add(a @ b, c, alpha=0.1), torch.add(c, c, alpha=2), torch.add(c, 3, alpha=2), c + c]

    flat = [torch.zeros(4, 3), torch.zeros(3, 5), torch.ones(4, 5)]
    graph = make_fx(function)(*flat)
    compile_graph.write_factors_out(graph)
    expected = function(*flat)
    for call in (compile_graph.compiled(graph, flat, "eager"), compile_graph.compiled(graph, flat, "inductor")):
        torch.testing.assert_close([*call(flat)], expected)


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
