"""Which tests start programs or compile: found in the code of the test, its fixtures and the helpers they call.

The marks are `subprocess` and `compile`. A test that starts a program only through code outside `tests/` is marked by
hand.
"""

import functools
import os
import subprocess
import types
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import pytest

from tests import fork_server

# Names and texts that stand in the code of tests that compile; `graph` is also the keyword argument of both APIs.
COMPILING = {"GraphTrainer", "GraphBase", "compile", "inductor", "aot_eager", "graph", "enable_graph"}
# Products of cases that take minutes.
only_in_torture = pytest.mark.skipif("TORTURE" not in os.environ, reason="takes minutes: make torture")
STARTING = (subprocess, fork_server.python)


def add_marks(item: pytest.Item) -> None:
    found = set(_kinds_of(getattr(item, "function", None)))
    definitions = getattr(item, "_fixtureinfo", None)
    for fixtures in definitions.name2fixturedefs.values() if definitions else ():
        found |= {kind for fixture in fixtures for kind in _kinds_of(fixture.func)}
    values = getattr(item, "callspec", None)
    if values is not None and any(isinstance(value, str) and value == "inductor" for value in values.params.values()):
        found.add("compile")
    for kind in found - {mark.name for mark in item.iter_markers()}:
        item.add_marker(kind)


@functools.cache
def _kinds_of(function: Any) -> frozenset[str]:
    found = set()
    seen: set[int] = set()
    waiting = [function]
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if any(value is start for start in STARTING):
            found.add("subprocess")
            continue
        for code, scope in _codes(value):
            names = set(_names(code))
            if names & COMPILING:
                found.add("compile")
            waiting += [scope[name] for name in names if name in scope and _may_start(scope[name])]
    return frozenset(found)


def _may_start(value: Any) -> bool:
    """Whether to look into it: what belongs to the tests."""
    if isinstance(value, types.ModuleType):
        return value is subprocess
    return callable(value) and str(getattr(value, "__module__", "")).startswith(("tests", "test_", "conftest"))


def _codes(value: Any) -> Iterator[tuple[types.CodeType, dict[str, Any]]]:
    value = getattr(value, "__wrapped__", value)
    members: Iterable[Any] = vars(value).values() if isinstance(value, type) else [value]
    for member in members:
        inner: Callable[..., Any] | None = getattr(member, "__func__", member)
        if isinstance(inner, types.FunctionType):
            yield inner.__code__, inner.__globals__


def _names(code: types.CodeType) -> Iterator[str]:
    """Names and texts in a function: those of keyword arguments stand among the constants."""
    constants = chain.from_iterable(c if isinstance(c, tuple) else (c,) for c in code.co_consts)
    yield from code.co_names
    for constant in constants:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, types.CodeType):
            yield from _names(constant)
