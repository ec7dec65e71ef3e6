"""If compiling ahead of time fails or changes, the program is called from Python."""

from typing import Any

import pytest

from tests._torch_compat.conftest import CHANGES, Trained, change_torch
from trainwright.graph import ahead_of_time, compile_graph

pytestmark = pytest.mark.usefixtures("compiler")


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
