"""Calls that are described now and made later, and the files that hold them."""

import functools
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig

from trainwright.config.configurable import takes_config
from trainwright.config.dotted import dotted_path, is_taken_apart
from trainwright.config.errors import ConfigError, ConfigKeyError, ConfigTypeError, did_you_mean
from trainwright.config.instantiate import TARGET
from trainwright.config.overrides import apply_overrides
from trainwright.config.provenance import set_origin, trust
from trainwright.config.python_file import as_node, load_python
from trainwright.config.save import save
from trainwright.config.source import to_py
from trainwright.config.yaml_file import load_yaml


class LazyCall:
    """``LazyCall(target)(**arguments)`` describes ``target(**arguments)`` as a config node.

    :func:`instantiate` makes the call.

    ``target`` is a callable, the dotted path of one, or a lazy call of one. The arguments may hold lazy calls
    themselves and stay open to edits: ``node.lr = 0.1``, ``del node.lr``, ``node._target_ = other``. One positional
    mapping stands for keyword arguments (for the configuration, where the target has a ``from_config``).

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
            came = ", ".join(type(arg).__name__ for arg in args)
            raise ConfigTypeError(
                f"{self!r}: got positional arguments ({came}); it takes keyword arguments, or one mapping of them."
            )
        mapping = args[0]
        if takes_config(self._target):
            return {"cfg": mapping}
        if isinstance(mapping, DictConfig):
            return {str(key): value for key, value in mapping.items_ex(resolve=False)}
        return {str(key): value for key, value in mapping.items()}


class LazyConfig:
    """Read, change and write configurations."""

    @staticmethod
    def load(filename: str | os.PathLike[str], keys: str | Sequence[str] | None = None) -> Any:
        """The configuration in a ``.py``, ``.yaml`` or ``.yml`` file, read afresh each time.

        Without ``keys`` a config of all global dicts, lists of configs and config nodes that do not begin with ``_``;
        with one key that global, of whatever type; with several a tuple of them. A Python file is code and may do
        anything code may; YAML is data: it is read safely, and what it may call is limited (see
        :mod:`trainwright.config.trust`).

        Raises:
            MissingFileError, ConfigSyntaxError, ConfigImportError, ConfigKeyError (no such global), ConfigError.
        """
        suffix = Path(filename).suffix
        if suffix == ".py":
            found: dict[str, Any] | DictConfig = load_python(filename)
        elif suffix in (".yaml", ".yml"):
            found = load_yaml(filename)
        else:
            raise ConfigError(
                f"{filename}: a configuration file ends in .py, .yaml or .yml, not {suffix or 'nothing'!r}."
            )
        if keys is None:
            return found if isinstance(found, DictConfig) else _as_config(found, filename)
        if isinstance(keys, str):
            return _pick(found, keys, filename)
        return tuple(_pick(found, key, filename) for key in keys)

    @staticmethod
    def load_rel(filename: str | os.PathLike[str], keys: str | Sequence[str] | None = None) -> Any:
        """:meth:`load` with a path relative to the file that calls."""
        caller = sys._getframe(1).f_code.co_filename
        if caller.startswith("<"):
            raise ConfigError(
                f"load_rel({str(filename)!r}): the caller, {caller}, is no file. Use load with a full path."
            )
        return LazyConfig.load(Path(caller).parent / filename, keys)

    save = staticmethod(save)
    to_py = staticmethod(to_py)
    apply_overrides = staticmethod(apply_overrides)


def _storable(target: Any) -> Any:
    """A class that a config would take apart into its fields goes in as its dotted path."""
    if is_taken_apart(target):
        return dotted_path(target) or functools.partial(target)
    return target


def _as_config(found: Mapping[str, Any], filename: str | os.PathLike[str]) -> DictConfig:
    configs = {
        name: as_node(value, name, filename)
        for name, value in found.items()
        if isinstance(value, DictConfig | ListConfig | dict) and not name.startswith("_")
    }
    cfg = DictConfig(configs, flags={"allow_objects": True})
    set_origin(cfg, os.path.abspath(filename))
    return cfg


def _pick(found: Mapping[str, Any] | DictConfig, key: str, filename: str | os.PathLike[str]) -> Any:
    if key not in found:
        names = [str(name) for name in found if not str(name).startswith("_")]
        raise ConfigKeyError(f"{filename}: there is no {key!r} in it. {did_you_mean(key, names)}")
    return as_node(found[key], key, filename)
