"""Public names that load their file on first use (PEP 562), so that a package costs what is used of it and no more."""

import gc
import importlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType

_DECLARED = re.compile(r"from ([\w.]+) import \(?\s*(\w+) as \2\b")


def on_first_use(package: str, names_of: Mapping[str, str]) -> Callable[[str], object]:
    """The ``__getattr__`` of ``package``. ``names_of`` has, for each of its files, the names it holds.

    A file's own name stands for the file; what it holds under that name cannot be had so, as importing a file puts the
    file there. A whole path, ``trainwright.package.file``, is a file of another package.

    >>> __getattr__ = on_first_use("trainwright.config", {"errors": "UserError ConfigError"})
    >>> __getattr__("ConfigError")
    <class 'trainwright.config.errors.ConfigError'>
    """
    file_of = {name: file for file, names in names_of.items() for name in names.split()}

    def load(name: str) -> object:
        if name not in file_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        file = file_of[name]
        with _collector_paused():
            module = importlib.import_module(file if file.startswith("trainwright.") else f"{package}.{file}")
        value: object = module if name == file else getattr(module, name)
        setattr(sys.modules[package], name, value)  # found directly from now on
        return value

    return load


def names_of(package: str) -> dict[str, str]:
    """For :func:`on_first_use`: the names that a package imports for type checkers, as ``from module import A as A``.

    >>> names_of("trainwright.config")["trainwright.config.arguments"]
    'default_argument_parser'
    """
    with open(str(sys.modules[package].__file__), encoding="utf-8") as file:
        text = file.read()
    found: dict[str, str] = {}
    for module, name in _DECLARED.findall(text):
        place = name if module == package else module
        found[place] = f"{found.get(place, '')} {name}".lstrip()
    return found


def ring(name: str) -> ModuleType:
    """A module that builds on the core (``graph``, ``tasks``, ``inspect``), for an entry point of the core to it.

    >>> ring("inspect.check.finding").Report(()).summary()
    '0 problems in 0 s'
    """
    with _collector_paused():
        return importlib.import_module(f"trainwright.{name}")


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
