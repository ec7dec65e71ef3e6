"""Public names that load their file on first use (PEP 562), so that a package costs what is used of it and no more."""

import ast
import difflib
import gc
import importlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

_DECLARED = re.compile(r"from ([\w.]+) import \(?\s*(\w+) as \2\b")


def on_first_use(package: str, module_of: Mapping[str, str]) -> Callable[[str], object]:
    """The ``__getattr__`` of ``package``. ``module_of`` has the module of each name; a module is in ``package`` itself.

    >>> __getattr__ = on_first_use("trainwright.config", {"ConfigError": "trainwright.base.errors"})
    >>> __getattr__("ConfigError")
    <class 'trainwright.base.errors.ConfigError'>
    """

    def load(name: str) -> object:
        if name not in module_of:
            text, hint = f"module {package!r} has no attribute {name!r}", import_hint(name, package)
            # Of `from package import name` Python drops the text of an AttributeError.
            if hint and sys._getframe(1).f_code.co_name == "_handle_fromlist":
                raise ImportError(text + hint, name=package)
            raise AttributeError(text + hint)
        is_module = module_of[name] == package
        with _collector_paused():
            module = _imported(f"{package}.{name}" if is_module else module_of[name])
        value: object = module if is_module else getattr(module, name)
        setattr(sys.modules[package], name, value)  # found directly from now on
        return value

    return load


# The packages with public names, in the order in which their names are looked for.
PUBLIC = ("hooks", "events", "evaluation", "checkpoint", "config", "data", "models", "optim", "parallel", "engine")


def import_hint(name: str, package: str, lead: str = ": it is") -> str:
    """The import of the public name that is meant, after ``lead``, or of the nearest; "" without one."""
    folders = vars(sys.modules[package]).get("__path__", ())  # not with getattr, which asks a module for it here
    if name.startswith("_") or PathFinder.find_spec(f"{package}.{name}", folders) is not None:  # a file of the package
        return ""
    # The last one of these that has a name counts.
    packages = [*(f"trainwright.{one}" for one in reversed(PUBLIC)), "trainwright"]
    place_of = {public: place for place in packages for public in names_of(place)}
    place_of |= dict.fromkeys(vars(sys.modules[package]).get("__all__", ()), package)
    if name in place_of:
        return f"{lead} `from {place_of[name]} import {name}`"
    longer = [public for public in place_of if len(name) > 3 and public.startswith(name)]
    near = difflib.get_close_matches(name, place_of, n=1, cutoff=0.8) or sorted(longer, key=len)
    return f". Did you mean `from {place_of[near[0]]} import {near[0]}`?" if near else ""


@cache
def names_of(package: str) -> tuple[str, ...]:
    """What the ``__all__`` of a package of trainwright has, from its file: importing all packages takes seconds.

    >>> "EventStorage" in names_of("trainwright.events")
    True
    """
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        return ()
    source = Path(spec.origin).read_text(encoding="utf-8")
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__":
            return tuple(ast.literal_eval(statement.value))
    return tuple(_declared_in(source))


def _declared_in(source: str) -> dict[str, str]:
    """The module of each name that a file imports as ``from module import Name as Name``."""
    return {name: module for module, name in _DECLARED.findall(source)}


def declared_names(package: str) -> tuple[list[str], Callable[[str], object]]:
    """``__all__`` and ``__getattr__`` of a package whose names are those that it imports for type checkers.

    There they are written as ``from module import Name as Name``.

    >>> names, __getattr__ = declared_names("trainwright")
    >>> "DefaultTrainer" in names
    True
    """
    module_of = _declared_in(Path(str(sys.modules[package].__file__)).read_text(encoding="utf-8"))
    return [*module_of], on_first_use(package, module_of)


def ring(name: str) -> ModuleType:
    """A module that builds on the core (``graph``, ``tasks``, ``inspect``), for an entry point of the core to it.

    >>> ring("inspect.check.finding").Report(()).summary()
    '0 problems in 0 s'
    """
    with _collector_paused():
        return importlib.import_module(f"trainwright.{name}")


def _imported(name: str) -> ModuleType:
    """The module. An AttributeError in it is an ImportError: Python takes it for a package without the name that is
    imported, and drops its text.
    """
    try:
        return importlib.import_module(name)
    except AttributeError as error:
        raise ImportError(f"{name} cannot be imported: {type(error).__name__}: {error}", name=name) from error


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Imports leave no garbage, but may set off a search through all that torch has made, as long as they take."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
