"""Reading a configuration by dotted key."""

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, ListConfig

_ABSENT = object()


def try_get_key(cfg: Any, *keys: str, default: Any = None) -> Any:
    """The value of the first of the dotted ``keys`` that exists, else ``default``.

    A key that is present with None gives None.

    >>> try_get_key({"train": {"seed": 1}}, "seed", "train.seed")
    1
    """
    for key in keys:
        value = cfg
        for part in key.split("."):
            value = _step(value, part)
            if value is _ABSENT:
                break
        if value is not _ABSENT:
            return value
    return default


def _step(node: Any, part: str) -> Any:
    if isinstance(node, Mapping | DictConfig):
        # Not get(), for which a key that is present with None is absent in a config.
        return node[part] if part in node else _ABSENT  # noqa: SIM401
    if isinstance(node, list | tuple | ListConfig) and part.isdigit() and int(part) < len(node):
        return node[int(part)]
    return _ABSENT
