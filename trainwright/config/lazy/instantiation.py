"""``instantiate``: build the objects that a configuration describes, inner nodes first."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainwright.base.errors import ConfigError, ConfigImportError, ConfigKeyError, ConfigTypeError
from trainwright.config.lazy.allowlist import locate_untrusted
from trainwright.config.lazy.provenance import (
    OWN_FILES,
    TARGET,
    building_data,
    holds_data,
    is_trusted,
    origin_file,
    origin_of,
    override_at,
    overrides_of,
    raw_children,
    shown,
)
from trainwright.config.lazy.targets import argument_fault, locate, short_name, texts_for_bools

RECURSIVE = "_recursive_"
PARTIAL = "_partial_"
SPECIAL_KEYS = (TARGET, RECURSIVE, PARTIAL)

_CALLING = "error while calling "


def instantiate(cfg: Any, /, **kwargs: Any) -> Any:
    """Build the object that ``cfg`` describes.

    The ``_target_`` of a mapping (an object, or its dotted path) is called with the other keys as arguments; nodes in
    these are built first. ``kwargs`` replace keys before these are built. A list is passed as a plain list, a mapping
    that contains nodes as a plain dict, a mapping without nodes as the config that it is. Other objects are passed as
    they are, never copied.

    ``_recursive_: False`` in a node keeps its children as configs. ``_partial_: True`` returns a ``functools.partial``
    of the target (the target itself without other keys) instead of calling it.

    Raises:
        ConfigError: a target does not exist, is not allowed, or does not accept an argument. An error of the target
            itself keeps its class and gets a message with the key path, the target and the cause
            (``model.backbone: error while calling Net(...): ...``); the original is its ``__cause__``. An exception
            class that takes more than a message is raised unchanged, with a note.
    """
    if kwargs and _is_node(cfg):
        return _call(cfg, kwargs, "")
    return _build(cfg, "")


def locate_target(node: Mapping[str, Any] | DictConfig, path: str = "") -> Callable[..., Any]:
    """The callable that ``node`` names. A target from data must be in the allowlist; one that is a node is built."""
    try:
        return find_target(node)
    except (ConfigError, ConfigImportError) as error:
        raise type(error)(f"{_place(node, TARGET, path)}: {error}") from error


def find_target(node: Mapping[str, Any] | DictConfig) -> Callable[..., Any]:
    """:func:`locate_target` with errors that do not name the place of the node, for callers that add it."""
    raw = raw_children(node)[TARGET] if isinstance(node, DictConfig) else node[TARGET]
    target = _child(node, TARGET)
    if isinstance(target, str):
        # An interpolation may refer to data, so it is treated as data even in a node that code wrote.
        is_interpolation = hasattr(raw, "_is_interpolation") and raw._is_interpolation()
        if is_trusted(node) and not is_interpolation:
            target = locate(target)
        else:
            partial = bool(node.get(PARTIAL, False))
            target = locate_untrusted(target, config_file=origin_file(node), partial=partial)
    elif isinstance(target, Mapping | DictConfig):
        target = _build(target, TARGET)
    if not callable(target):
        raise ConfigTypeError(
            f"got {target!r} ({type(target).__name__}); a target is a callable, or the dotted path of one."
        )
    found: Callable[..., Any] = target
    return found


def _build(value: Any, path: str) -> Any:
    """``path`` is the key of ``value`` relative to the argument of :func:`instantiate`; plain containers have none."""
    if isinstance(value, DictConfig | ListConfig) and (value._is_none() or value._is_missing()):
        return None
    if _is_node(value):
        return _call(value, {}, path)
    if isinstance(value, ListConfig):
        return [_build(_child(value, index), _join(path, index)) for index in range(len(value))]
    if isinstance(value, DictConfig):
        if dataclasses.is_dataclass(value._metadata.object_type):
            return OmegaConf.to_object(value)
        if not _holds_node(value):
            return value
        # A plain dict, because a config would convert dataclasses and lists in it.
        return {key: _build(_child(value, key), _join(path, key)) for key in value}
    if type(value) is dict:
        return {key: _build(child, _join(path, key)) for key, child in value.items()} if _holds_node(value) else value
    if type(value) in (list, tuple):
        built = (_build(child, _join(path, index)) for index, child in enumerate(value))
        return type(value)(built) if _holds_node(value) else value
    return value


def _call(node: Mapping[str, Any] | DictConfig, replaced: Mapping[str, Any], path: str) -> Any:
    target = locate_target(node, path)
    recursive = replaced.get(RECURSIVE, node.get(RECURSIVE, True))
    kwargs: dict[str, Any] = {}
    kept = getattr(target, "builds_itself", ())  # nodes that the target completes
    is_data = not is_trusted(node)
    with building_data(is_data):
        for key in node:
            if key not in SPECIAL_KEYS and key not in replaced:
                child = _child(node, key)
                kwargs[str(key)] = _build(child, _join(path, key)) if recursive and key not in kept else child
    kwargs.update({key: value for key, value in replaced.items() if key not in SPECIAL_KEYS})

    partial = bool(node.get(PARTIAL, False))
    fault = argument_fault(target, kwargs, partial=partial) or _text_for_bool(node, target, kwargs)
    if fault is not None:
        raise ConfigTypeError(f"{_place(node, path=path)}: {fault}")
    if partial:
        return functools.partial(target, **kwargs) if kwargs else target
    try:
        # A trusted function may instantiate its arguments, which may be data.
        with building_data(is_data or holds_data(node)):
            return target(**kwargs)
    except Exception as error:
        shown_already = "\n".join([str(error), *getattr(error, "__notes__", ())])
        if _CALLING in shown_already:  # the message names an inner node
            raise
        where = _path(node) or path
        message = f"{where}: {_CALLING}" if where else _CALLING
        message += f"{short_name(target)}(...){_set_in(node)}: {type(error).__name__}: {error}"
        named = _with_message(error, message)
        if named is None:
            error.add_note(message)
            raise
        raise named from error


def _text_for_bool(node: Any, target: Callable[..., Any], kwargs: Mapping[str, Any]) -> str | None:
    """Without an annotation, what a Python file says may be meant so; a text of the command line is not."""
    for name, is_declared in texts_for_bools(target, kwargs).items():
        if is_declared or override_at(node, name) is not None:
            return (
                f"{short_name(target)} takes true or false as {name}; got {kwargs[name]!r} (str), which would count as"
                f" true. Write true or false."
            )
    return None


def _with_message(error: Exception, message: str) -> Exception | None:
    """An error of the same class with another message; None if the class may take more than a message."""
    module = type(error).__module__
    if len(error.args) > 1 or not (module == "builtins" or module.startswith("trainwright.")):
        return None
    # A KeyError shows the repr of its message.
    return ConfigKeyError(message) if type(error) is KeyError else type(error)(message)


def _join(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


def _child(node: Any, key: Any) -> Any:
    """The value at ``key`` with interpolations resolved. An error names its path."""
    try:
        return node[key]
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        raise ConfigKeyError(f"{_place(node, key)}: {reason}") from error


def _is_node(value: Any) -> bool:
    if isinstance(value, DictConfig):
        return not (value._is_none() or value._is_missing()) and TARGET in value
    return isinstance(value, dict) and TARGET in value


def _holds_node(value: Any) -> bool:
    """Whether ``value`` is or contains a node to build. Interpolations are followed."""
    if isinstance(value, DictConfig | ListConfig):
        if _is_node(value) or dataclasses.is_dataclass(value._metadata.object_type):
            return True
        nodes = (child._maybe_dereference_node(False) for child in raw_children(value).values())
        return any(_holds_node(node) for node in nodes)
    if type(value) is dict:
        return _is_node(value) or any(_holds_node(child) for child in value.values())
    return type(value) in (list, tuple) and any(_holds_node(child) for child in value)


def _path(node: Any) -> str:
    """The dotted key of a node in its configuration, as in an override."""
    keys: list[str] = []
    while isinstance(node, DictConfig | ListConfig) and node._key() is not None:
        keys.append(str(node._key()))
        node = node._get_parent()
    return ".".join(reversed(keys))


def _place(node: Any, key: Any = None, path: str = "") -> str:
    parts = [part for part in (_path(node) or path, "" if key is None else str(key)) if part]
    return (".".join(parts) or "config") + _set_in(node)


def _set_in(node: Any) -> str:
    origin = origin_of(node)
    is_default = origin is not None and Path(origin).is_relative_to(OWN_FILES)
    places = [f"set in {shown(origin)}"] if origin and not is_default else []
    places += [f"override {text!r}" for text in overrides_of(node)]
    return f" [{', '.join(places)}]" if places else ""
