"""If the compiler of graphs fails, or compiles something else, steps stay eager."""

from typing import Any

import pytest
import torch

from tests._torch_compat.conftest import CHANGES, Trained, change_torch
from trainwright.graph import compile_graph

pytestmark = pytest.mark.usefixtures("compiler")


def another(graph: Any, flat: Any, options: Any) -> Any:
    return lambda *inputs: [output + 1 for output in graph(*inputs)]


@pytest.mark.exhaustive(every=2)
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
