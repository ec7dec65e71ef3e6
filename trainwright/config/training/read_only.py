"""Dicts and lists inside a checked configuration: changed only as a whole, so that every change is checked."""

import enum
import numbers
import os
from collections.abc import Mapping
from typing import Any, NoReturn

from trainwright.config.enums import GivenName
from trainwright.config.errors import ConfigTypeError


class ReadOnlyDict(dict[str, Any]):
    """A dict that refuses to be changed. A copy of it is a plain dict."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise ConfigTypeError(
            "This dict belongs to a configuration, which checks changes of the whole: assign a new one, for example"
            " config.early_stopping = {**config.early_stopping, 'patience': 2}."
        )

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse

    def copy(self) -> dict[str, Any]:
        return dict(self)

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


class ReadOnlyList(list[Any]):
    """A list that refuses to be changed. A copy of it is a plain list."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise ConfigTypeError(
            "This list belongs to a configuration, which checks changes of the whole: assign a new one, for example"
            " config.metrics = [*config.metrics, 'F1Score']."
        )

    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse
    append = extend = insert = remove = pop = clear = sort = reverse = _refuse

    def copy(self) -> list[Any]:
        return list(self)

    def __reduce__(self) -> Any:
        return list, (list(self),)


def read_only(value: Any) -> Any:
    """``value`` with every dict and list in it as one that refuses to be changed."""
    if isinstance(value, dict):
        return ReadOnlyDict({key: read_only(item) for key, item in value.items()})
    if isinstance(value, list):
        return ReadOnlyList([read_only(item) for item in value])
    return value


def plain(value: Any) -> Any:
    """``value`` in the types that YAML and JSON have, where there is one for it: a new dict or list, text, a number.

    Enum members are their values, paths and devices text, tuples lists, numpy's numbers Python's, and what has a
    ``to_dict`` what that gives. Anything else stays.
    """
    if isinstance(value, enum.Enum):
        return plain(value.value)
    if value is None or type(value) in (bool, int, float, str, GivenName):
        return value
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "to_dict") and not isinstance(value, type):
        return plain(value.to_dict())
    if isinstance(value, str) or type(value).__name__ == "device":  # a torch.device; torch need not be imported here
        return str(value)
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    return float(value) if isinstance(value, numbers.Real) else value
