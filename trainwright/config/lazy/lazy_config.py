"""``LazyConfig``, ``get_config`` and ``try_get_key``: load a configuration from a file and read it."""

import functools
import inspect
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig

from trainwright.base.errors import (
    ConfigError,
    ConfigKeyError,
    ConfigTypeError,
    MissingFileError,
    checked_arguments,
    did_you_mean,
    nearest_name,
)
from trainwright.base.notebook import show_type_as_html, tree
from trainwright.config.lazy.overrides import apply_overrides
from trainwright.config.lazy.provenance import OWN_FILES, SECTIONS, TARGET, mark, mark_default, set_origin, value_at
from trainwright.config.lazy.python_file import as_node, load_python
from trainwright.config.lazy.serialization import DEFAULTS, save, to_plain, to_py
from trainwright.config.lazy.targets import dotted_path, is_structured, named_arguments, short_name, takes_config
from trainwright.config.secrets import without_secrets
from trainwright.config.unread import warn_of_lists
from trainwright.config.yaml_file import load_yaml

logger = logging.getLogger("trainwright.config")


class LazyCall:
    """``LazyCall(target)(**arguments)`` describes a call as a config node; :func:`instantiate` makes the call.

    ``target`` is a callable, its dotted path, or a lazy call that returns it. Arguments may contain lazy calls and can
    be changed: ``node.lr = 0.1``, ``del node.lr``, ``node._target_ = other``. One positional mapping is used as keyword
    arguments (as ``cfg`` if the target has a ``from_config``).

    >>> LazyCall(dict)(a=1).a
    1
    """

    @checked_arguments(usage="LazyCall(Target)(...): the arguments of the call are in brackets of their own")
    def __init__(self, target: Any) -> None:
        if not (callable(target) or isinstance(target, str | Mapping | DictConfig)):
            raise ConfigTypeError(
                f"LazyCall: got {target!r} ({type(target).__name__}); it takes a callable, or the dotted path of one."
            )
        torch = sys.modules.get("torch")  # not loaded: it is no module of torch
        if torch is not None and isinstance(target, torch.nn.Module):
            kind = type(target).__name__
            raise ConfigTypeError(
                f"LazyCall: got an object of {kind}, which a call would run; it takes the class: LazyCall({kind})(...)."
            )
        self._target = target

    def __call__(self, /, *args: Any, **kwargs: Any) -> DictConfig:
        target = self._target
        if is_structured(target):  # omegaconf would convert it to a section
            target = dotted_path(target) or functools.partial(target)
        content = {TARGET: target, **self._from_mapping(args), **kwargs}
        node = DictConfig(content, flags={"allow_objects": True})
        mark(node, is_data=False)
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
                f"{named_arguments(self._target, args)}"
            )
        mapping = args[0]
        if takes_config(self._target):
            return {"cfg": mapping}
        items = mapping.items_ex(resolve=False) if isinstance(mapping, DictConfig) else mapping.items()
        return {str(key): value for key, value in items}


def call_fault(value: Any) -> str | None:
    """What to write where ``value`` lacks its call, or None."""
    if isinstance(value, LazyCall):
        target = short_name(value._target)
        return f"LazyCall({target}) was not called. Did you forget the second call? Write LazyCall({target})(...)."
    if inspect.isclass(value) or inspect.isroutine(value):
        called = short_name(value)
        if "<lambda>" in called:
            return (
                "got a lambda. Describe the call that it makes, for example LazyCall(Net)(width=64) for Net(width=64)."
            )
        what = "class" if inspect.isclass(value) else "function"
        return f"got the {what} {called}. Describe the call of it: LazyCall({called})(...)."
    return None


_ONLY_SETTINGS = ("train", "graph")


def section_fault(name: str, value: Any) -> str | None:
    """Why ``value`` cannot be the section ``name``, with a suggestion, or None."""
    if value is None or isinstance(value, Mapping | DictConfig):
        return None
    if name not in _ONLY_SETTINGS and (fault := call_fault(value)) is not None:
        return fault
    example = f"for example {name} = {SECTIONS[name]}"
    if isinstance(value, tuple) and len(value) == 1:
        return f"got a tuple of one: remove the comma at the end of the line, {name} = (...),"
    if inspect.ismodule(value):
        return (
            f"got the module {value.__name__}; it must be a section, {example}. If it is only an import, "
            "give it another name."
        )
    is_plain = isinstance(value, bool | int | float | complex | str | bytes)
    if is_plain or name in _ONLY_SETTINGS or (name != "dataloader" and isinstance(value, list | tuple | ListConfig)):
        switch = (
            " On the command line: graph.enabled=true." if name == "graph" and isinstance(value, bool | str) else ""
        )
        if type(value).__name__ == "TrainingConfig":
            return f"got a TrainingConfig, which is of the Python API; it must be a section, {example}."
        return f"got {value!r:.80} ({type(value).__name__}); it must be a section, {example}.{switch}"
    return None


class MissingConfigError(MissingFileError, RuntimeError):
    """There is no packaged configuration of this name. A RuntimeError, as documented for ``get_config``."""


PACKAGED = OWN_FILES / "defaults"
# Packaged defaults that are replaced if the user sets another of them: the length, and the metric with its direction.
MARKED = ("train.train_iter", "train.train_epoch", "train.evaluation.eval_metric", "train.evaluation.eval_mode")


_OF_OTHERS = {  # packaged configurations of LiBai
    "common/models/": " Describe a model of any library: model = LazyCall(Net)(...).",
    "common/data/": " Describe a loader: dataloader.train = LazyCall(build_image_train_loader)(dataset=...).",
}


def get_config(name: str) -> DictConfig:
    """A new copy of a packaged configuration, such as ``get_config("common/train.py").train``, or of a ``.py`` file.

    A name that is not packaged is a path.

    Raises:
        MissingConfigError: neither exists; the message lists the packaged configurations.
    """
    there = sorted(path.relative_to(PACKAGED).as_posix() for path in PACKAGED.rglob("*.py"))
    if name not in there and name.endswith(".py") and Path(name).is_file():
        own: DictConfig = LazyConfig.load(name)
        return own
    if name not in there:
        hint = nearest_name(name, there)
        hint = next((text for start, text in _OF_OTHERS.items() if name.startswith(start)), hint)
        raise MissingConfigError(
            f"{name!r} is not available in trainwright's configs.{hint} Available: {', '.join(there)}."
        )
    config: DictConfig = LazyConfig.load(PACKAGED / name)
    for path in MARKED if "train" in config else ():
        above, _, key = path.rpartition(".")
        mark_default(value_at(config, above), key)
    return config


class LazyConfig:
    """Read, change and write configurations."""

    @staticmethod
    def load(filename: str | os.PathLike[str], keys: str | Sequence[str] | None = None) -> Any:
        """The configuration in a ``.py``, ``.yaml`` or ``.yml`` file, which is read at each call.

        Without ``keys``: a config of the global dicts, config nodes and lists of them whose names do not start with
        ``_``, and of objects with the name of a section. With one key: this global, of any type. With several: a tuple
        of them. A Python file is code; YAML is data: it is parsed safely, and its targets must be in the allowlist (see
        :mod:`trainwright.config.lazy.allowlist`).

        Raises:
            MissingFileError, ConfigSyntaxError, ConfigImportError, ConfigKeyError (no such global), ConfigTypeError (a
            value that cannot be the section of its name), ConfigError.
        """
        suffix = Path(filename).suffix
        if suffix == ".py":
            found: dict[str, Any] | DictConfig = load_python(filename)
        elif suffix in (".yaml", ".yml"):
            found = load_yaml(filename)
            _mark_defaults(found, filename)
        else:
            folder = Path(filename).parent
            of_checkpoint = (folder / "manifest.json").is_file()
            raise ConfigError(
                f"{filename}: a config file ends in .py, .yaml or .yml, not {suffix or 'nothing'!r}."
                + (f" To evaluate this checkpoint: trainwright eval {folder}" if of_checkpoint else "")
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
                f"load_rel({str(filename)!r}): the caller, {caller}, is not a file. Use load with a full path."
            )
        return LazyConfig.load(Path(caller).parent / filename, keys)

    save = staticmethod(save)
    to_py = staticmethod(to_py)
    apply_overrides = staticmethod(apply_overrides)


def _mark_defaults(cfg: DictConfig, filename: str | os.PathLike[str]) -> None:
    """Mark those values of a saved file that the user set neither before nor in the file."""
    first, _, _ = Path(filename).read_text(encoding="utf-8").partition("\n")
    for entry in first.removeprefix(DEFAULTS).replace(",", " ").split() if first.startswith(DEFAULTS) else ():
        path, is_derived, value = entry.partition("=")
        above, _, key = path.rpartition(".")
        section = value_at(cfg, above)
        if not is_derived:
            value = str(value_at(get_config("common/defaults.py"), path))
        if isinstance(section, DictConfig) and key in section and str(section[key]) == value:
            mark_default(section, key, is_derived=bool(is_derived))


def html_of(cfg: DictConfig) -> str | None:
    """What a notebook shows, without secrets; None for a config of another program."""
    if not cfg._get_flag("allow_objects"):
        return None
    plain, _ = without_secrets(to_plain(cfg)[0])
    return tree(plain, name="config")


show_type_as_html("omegaconf.dictconfig", "DictConfig", html_of)


def _as_config(found: Mapping[str, Any], filename: str | os.PathLike[str]) -> DictConfig:
    warn_of_lists(found)
    configs = {
        name: as_node(value, name, filename)
        for name, value in found.items()
        if isinstance(value, DictConfig | ListConfig | dict) and not name.startswith("_")
    }
    for name in SECTIONS:
        value = found.get(name)
        if (fault := section_fault(name, value)) is not None:
            raise ConfigTypeError(f"{filename}: {name}: {fault}")
        if value is not None and name not in configs:
            configs[name] = dict(value) if isinstance(value, Mapping) else value
    cfg = DictConfig(configs, flags={"allow_objects": True})
    set_origin(cfg, os.path.abspath(filename))
    return cfg


def _pick(found: Mapping[str, Any] | DictConfig, key: str, filename: str | os.PathLike[str]) -> Any:
    if key not in found:
        names = [str(name) for name in found if not str(name).startswith("_")]
        raise ConfigKeyError(f"{filename}: there is no {key!r} in it. {did_you_mean(key, names)}")
    return as_node(found[key], key, filename)


_ABSENT = object()


def try_get_key(cfg: Any, *keys: str, default: Any = None) -> Any:
    """The value of the first of the dotted ``keys`` that exists, else ``default``.

    A key that is present with None gives None.

    >>> try_get_key({"train": {"seed": 1}}, "seed", "train.seed")
    1
    """
    for key in keys:
        value = functools.reduce(_child, key.split("."), cfg)
        if value is not _ABSENT:
            return value
    return default


def _child(node: Any, part: str) -> Any:
    if isinstance(node, Mapping | DictConfig):
        # Not get(), for which a key that is present with None is absent in a config.
        return node[part] if part in node else _ABSENT  # noqa: SIM401
    if isinstance(node, list | tuple | ListConfig) and part.isdigit() and int(part) < len(node):
        return node[int(part)]
    return _ABSENT
