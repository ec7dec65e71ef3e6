"""Reading samples without a trace: what a data set changes in itself while it is read is restored afterwards.

A data set may open a file at its first read, fill a cache, count its reads, or draw from a generator of its own. A run
whose samples were read once more before it must be the run without that.
"""

import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

from trainwright.data.seeding import generator_state, is_generator, kept_generators, set_generator_state

_MAX_DEPTH, _MAX_OBJECTS, _MAX_ITEMS = 8, 4000, 1000
_CONTAINERS = (dict, OrderedDict, defaultdict, list, set, deque)


@contextmanager
def undone_reads(*parts: Any) -> Iterator[None]:
    """After the block, data sets and what they consist of are as before, and so are the global generators.

    Restored are attributes, dicts, lists and sets of at most 1000 items, and random generators, those of the modules
    of classes and functions included. Tensors and arrays are not: reading a sample does not write into them.
    """
    restores: list[Callable[[], object]] = []
    seen = set[int]()
    for part in parts:
        _save(part, 0, seen, restores)
    with kept_generators():
        try:
            yield
        finally:
            for restore in restores:
                restore()


def _save(value: Any, depth: int, seen: set[int], restores: list[Callable[[], object]]) -> None:
    """Add to ``restores`` what restores the state of a value, and of all that it holds."""
    if depth > _MAX_DEPTH or len(seen) > _MAX_OBJECTS or id(value) in seen or isinstance(value, ModuleType):
        return
    if is_generator(value):
        seen.add(id(value))
        restores.append(partial(set_generator_state, value, generator_state(value)))
        return
    for inner in _inside(value, seen, restores):
        _save(inner, depth + 1, seen, restores)


def _inside(value: Any, seen: set[int], restores: list[Callable[[], object]]) -> list[Any]:
    """What a value holds, whose own state is saved."""
    if type(value) in _CONTAINERS:
        if len(value) > _MAX_ITEMS:
            return []
        seen.add(id(value))
        restores.append(partial(_refill, value, value.copy()))
        return [*value.values()] if isinstance(value, dict) else [*value]
    if type(value) is tuple:
        return [*value] if len(value) <= _MAX_ITEMS else []
    if isinstance(value, FunctionType):
        seen.add(id(value))
        of_module = [one for one in [*value.__globals__.values()] if is_generator(one)]
        return [*_variables(value), *of_module]
    if isinstance(value, MethodType):
        return [value.__self__]
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    attributes, module_name = getattr(value, "__dict__", None), type(value).__module__
    if isinstance(value, type) or type(attributes) is not dict:
        return []
    if module_name.partition(".")[0] in sys.stdlib_module_names:  # a logger, a lock: shared with what is no data
        return []
    seen.add(id(value))
    restores.append(partial(_refill, attributes, attributes.copy()))
    module = sys.modules.get(module_name)
    of_module = [one for one in [*vars(module).values()] if is_generator(one)] if module is not None else []
    return [*attributes.values(), *of_module]


def _variables(function: FunctionType) -> Iterator[Any]:
    """The variables of outer functions that a function uses."""
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # it has no value yet
            yield cell.cell_contents


def _refill(container: Any, before: Any) -> None:
    if len(container) == len(before):
        now, then = (one.items() if isinstance(one, dict) else one for one in (container, before))
        if all(_is_same(*pair) for pair in zip(now, then, strict=True)):
            return
    container.clear()
    (container.update if isinstance(container, dict | set) else container.extend)(before)


def _is_same(first: Any, second: Any) -> bool:
    """Whether two values, or two entries of a dict, are the same objects."""
    if type(first) is tuple and type(second) is tuple and len(first) == len(second) == 2:
        return first[0] is second[0] and first[1] is second[1]
    return first is second
