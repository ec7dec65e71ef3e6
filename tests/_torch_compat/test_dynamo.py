"""Whatever becomes of the parts of torch that graph mode stands on, a training completes, eagerly, with one line."""

import functools
from typing import Any

import pytest

from tests._torch_compat.conftest import CHANGES, Trained, change_torch
from trainwright.graph import dynamo, traced_step

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
