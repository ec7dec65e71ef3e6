"""What a forward pass writes to beside the tensors it returns.

A program computes, and writes to no Python object. A forward pass may all the same set something for its own duration,
as models of transformers do; what looks after it as it did before is no matter. A counter is, or a tensor kept.
"""

import sys
from collections.abc import Callable, Mapping
from typing import Any


class Effects:
    """What is at ``sources`` before a forward pass; ``undo`` afterwards tells what has become another."""

    def __init__(self, sources: list[str], scope: Mapping[str, Any], names: Mapping[str, Any]) -> None:
        """Raises whatever comes of a source that leads nowhere."""
        within = {"L": scope, "G": _Names(names)}
        self._kept = [(source, found := eval(source, within), _contents(found)) for source in sources]
        if any(isinstance(found, type) for _, found, _ in self._kept):
            raise TypeError("what a class has cannot be put back as a whole")

    def undo(self, stand_for: Callable[[Any], Any]) -> list[str]:
        """Put everything back; gives the sources of what had changed. ``stand_for`` tells what a value is there for."""
        changed = [source for source, found, before in self._kept if _differ(_contents(found, stand_for), before)]
        for _, found, before in self._kept:
            _put_back(found, before)
        return changed


class _Names(dict[str, Any]):
    """Global names, with those that TorchDynamo makes for modules."""

    def __missing__(self, name: str) -> Any:
        return sys.modules[name.removeprefix("__import_").replace("_dot_", ".")]


def _contents(found: Any, stand_for: Callable[[Any], Any] = lambda value: value) -> Any:
    if isinstance(found, list):
        return [stand_for(value) for value in found]
    inside = found if isinstance(found, dict) else vars(found)
    return {key: stand_for(value) for key, value in inside.items()}


def _put_back(found: Any, before: Any) -> None:
    if isinstance(found, list):
        found[:] = before
        return
    inside = found if isinstance(found, dict) else vars(found)
    inside.clear()
    inside.update(before)


def _differ(now: Any, before: Any) -> bool:
    if isinstance(now, list):
        return len(now) != len(before) or any(map(_is_other, now, before))
    return now.keys() != before.keys() or any(_is_other(now[key], before[key]) for key in now)


def _is_other(left: Any, right: Any) -> bool:
    if left is right:
        return False
    is_plain = isinstance(left, bool | int | float | str) and type(left) is type(right)
    return not (is_plain and left == right) and not (isinstance(left, list | dict) and not left and left == right)
