"""If what the trace of an optimizer's step relies on changes in torch, steps stay eager."""

from operator import attrgetter

import pytest
import torch

from tests._torch_compat.conftest import Trained, change_torch
from trainwright.graph import traced_step

pytestmark = pytest.mark.usefixtures("compiler")

EAGER = "Graph mode: the steps stay eager: torch"


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
