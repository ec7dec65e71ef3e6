"""Call users' functions with the arguments they take, so that older signatures keep working."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from omegaconf import DictConfig

from trainwright.config.lazy.instantiation import instantiate, locate_target


def bind_arguments(function: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
    """``function`` with as many of the arguments as it takes; adds no Python frame."""
    parameters = inspect.signature(function).parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    takes_any = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    return partial(function, *(arguments if takes_any else arguments[: len(positional)]))


def call_with_known(node: Any, given: Mapping[str, Any]) -> Any:
    """Instantiate a config node with the arguments of ``given`` that its target takes and the node does not set.

    Anything but a node with a ``_target_`` (for example a loader object) is returned unchanged.
    """
    if not (isinstance(node, Mapping | DictConfig) and "_target_" in node):
        return node
    parameters = inspect.signature(locate_target(node)).parameters
    known = {name: value for name, value in given.items() if name in parameters and value is not None}
    return instantiate(node, **known)
