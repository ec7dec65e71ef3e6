"""``LazyCall``: describe a call now, make it later."""

import functools
import sys
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig

from trainwright.config.errors import ConfigTypeError
from trainwright.config.lazy.configurables import takes_config
from trainwright.config.lazy.instantiation import TARGET
from trainwright.config.lazy.provenance import set_origin, trust
from trainwright.config.lazy.targets import dotted_path, is_structured


class LazyCall:
    """``LazyCall(target)(**arguments)`` describes a call as a config node; :func:`instantiate` makes the call.

    ``target`` is a callable, its dotted path, or a lazy call that returns it. Arguments may contain lazy calls and can
    be changed: ``node.lr = 0.1``, ``del node.lr``, ``node._target_ = other``. One positional mapping is used as keyword
    arguments (as ``cfg`` if the target has a ``from_config``).

    >>> LazyCall(dict)(a=1).a
    1
    """

    def __init__(self, target: Any) -> None:
        if not (callable(target) or isinstance(target, str | Mapping | DictConfig)):
            raise ConfigTypeError(
                f"LazyCall: got {target!r} ({type(target).__name__}); it takes a callable, or the dotted path of one."
            )
        self._target = target

    def __call__(self, /, *args: Any, **kwargs: Any) -> DictConfig:
        content = {TARGET: _storable(self._target), **self._from_mapping(args), **kwargs}
        node = DictConfig(content, flags={"allow_objects": True})
        trust(node)
        caller = sys._getframe(1)
        set_origin(node, f"{caller.f_code.co_filename}:{caller.f_lineno}")
        return node

    def __repr__(self) -> str:
        return f"LazyCall({dotted_path(self._target) or self._target!r})"

    def _from_mapping(self, args: tuple[Any, ...]) -> dict[str, Any]:
        if not args:
            return {}
        if len(args) > 1 or not isinstance(args[0], Mapping | DictConfig):
            types = ", ".join(type(arg).__name__ for arg in args)
            raise ConfigTypeError(
                f"{self!r}: got positional arguments ({types}); it takes keyword arguments, or one mapping of them."
            )
        mapping = args[0]
        if takes_config(self._target):
            return {"cfg": mapping}
        if isinstance(mapping, DictConfig):
            return {str(key): value for key, value in mapping.items_ex(resolve=False)}
        return {str(key): value for key, value in mapping.items()}


def _storable(target: Any) -> Any:
    """A class that omegaconf would convert to a section is stored as its dotted path."""
    if is_structured(target):
        return dotted_path(target) or functools.partial(target)
    return target
