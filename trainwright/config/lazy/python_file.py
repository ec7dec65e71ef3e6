"""Python config files: each load runs the file again, and relative imports are resolved by path.

``from .a.b import x`` in a config file runs ``a/b.py`` relative to its folder, without a package or a cache, so that
changes to ``x`` in one file do not affect another. Other imports are ordinary Python imports, except that settings from
the file's own folder (``from configs.train import train`` in ``configs/config.py``) are fresh at each load, too.
"""

import ast
import builtins
import difflib
import importlib
import inspect
import os
import re
import sys
import traceback
import uuid
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from types import CodeType, SimpleNamespace
from typing import Any

from omegaconf import DictConfig, ListConfig
from omegaconf.errors import ConfigAttributeError, OmegaConfBaseException

from trainwright.base.errors import (
    ConfigImportError,
    ConfigKeyError,
    ConfigSyntaxError,
    ConfigTypeError,
    did_you_mean,
    nearest_name,
)
from trainwright.base.lazy_names import import_hint
from trainwright.config.lazy.provenance import SECTIONS, TARGET
from trainwright.config.yaml_file import regular_file

_PACKAGE = "_trainwright_config_"  # prefix of the package name of config files, by which an import finds its importer
_running: ContextVar[tuple[Path, ...]] = ContextVar("trainwright_running", default=())  # each loaded by the one before


def load_python(filename: str | os.PathLike[str]) -> dict[str, Any]:
    """Run a config file and return its globals."""
    path = Path(os.path.abspath(regular_file(filename)))
    known = set(sys.modules)
    importlib.invalidate_caches()  # the file may import one that was written just now
    try:
        return _run(path)
    finally:
        _forget_settings(set(sys.modules) - known, path.parent.resolve())


def as_node(value: Any, name: str, file: str | os.PathLike[str]) -> Any:
    """A plain dict as a config, any other value unchanged."""
    if type(value) is not dict:
        return value
    try:
        return DictConfig(value, flags={"allow_objects": True})
    except (OmegaConfBaseException, RecursionError) as error:
        raise ConfigTypeError(
            f"{file}: the dict {name!r} cannot be a section of a configuration: {str(error).splitlines()[0]} "
            f"If it is not a section, rename it to '_{name}'."
        ) from error


def _step_in(path: Path, error: Exception) -> traceback.FrameSummary | None:
    """The line of the file that raised the error."""
    steps = traceback.extract_tb(error.__traceback__)
    return next((step for step in reversed(steps) if step.filename == str(path)), None)


def _line_in(path: Path, error: Exception) -> str:
    """The line of the file that raised the error, as ", line 12"."""
    step = _step_in(path, error)
    return "" if step is None else f", line {step.lineno}"


def _without_lazy_call(path: Path, error: Exception) -> str:
    """A sentence for a call in the file itself that lacks an argument, which the run gives to a lazy call."""
    called = re.match(
        r"(\w+)(\.__init__)?\(\) missing .*'(train_batch_size|test_batch_size|params|optimizer)'", str(error)
    )
    is_here = traceback.extract_tb(error.__traceback__)[-1].filename == str(path)
    if called is None or not isinstance(error, TypeError) or not is_here:
        return ""
    return f". The run gives {called[3]!r} to a lazy call: write LazyCall({called[1]})(...)"


_SHORT = {"nn": "from torch import nn", "np": "import numpy as np", "F": "import torch.nn.functional as F"}


def _not_there(path: Path, error: Exception, namespace: Mapping[str, Any]) -> str:
    """A sentence for a name that is not defined, and for a lazy call that is called again."""
    if isinstance(error, TypeError) and "'DictConfig' object is not callable" in str(error):
        return (
            ". LazyCall(X)(...) describes a call, and takes no more brackets: the run makes the call, and"
            " instantiate(node) makes it at once"
        )
    is_here = traceback.extract_tb(error.__traceback__)[-1].filename == str(path)
    key = re.match(r"'dict' object has no attribute '(\w+)'", str(error))
    line = getattr(_step_in(path, error), "line", "")
    if isinstance(error, AttributeError) and key is not None and is_here and f".{key[1]}(" not in line:
        return f". A dict has keys: write [{key[1]!r}] in place of .{key[1]}"
    if not isinstance(error, NameError) or not error.name or not is_here:
        return ""
    if error.name in ("torch", "torchvision", "transformers", "os", "math", *_SHORT):
        return f". Write {_SHORT.get(error.name, f'import {error.name}')} at the top"
    if near := nearest_name(error.name, [one for one in namespace if one[0] != "_"]):
        return f".{near}"
    own = f". Import it, for example with `from your_module import {error.name}`, or define it above this line"
    return import_hint(error.name, "trainwright", ". Write") or own


# Libraries with config files of this form.
_OTHERS = ("libai", "detectron2", "hydra", "mmengine", "trainwright")


def _missing_module(path: Path, error: ImportError) -> str:
    """A sentence for an import from another library that is not installed, or from a module that is not in this one."""
    step = _step_in(path, error)
    if not isinstance(error, ModuleNotFoundError) or step is None:
        return ""
    if str(error.name).partition(".")[0] not in _OTHERS:
        of_python = traceback.extract_tb(error.__traceback__)
        last = next((one.filename for one in reversed(of_python) if "importlib" not in one.filename), "")
        if last not in (str(path), __file__):  # it is imported by another module
            return ""
        beside = [one.stem for one in path.parent.glob("*.py") if one != path]
        if error.name in beside:  # whose folder is not searched
            names = f"from .{error.name} import ..."
            return f". {error.name}.py is beside this file: write {names}, or move it to {path.parents[1]}"
        near = difflib.get_close_matches(str(error.name), beside, n=1, cutoff=0.85)
        return f". Did you mean {near[0]!r}?" if near else ""
    imported = re.search(r"\bimport\s+\(?\s*(\w+)", step.line or "")
    return "" if imported is None else import_hint(imported[1], "trainwright", ". Here it is")


def _import_error(path: Path, error: ImportError) -> ImportError:
    """The error of an import in the file, with the nearest name in the module."""
    place, name = f"{path}{_line_in(path, error)}", re.match("cannot import name '(.+?)' from", str(error))
    module = sys.modules.get(error.name or "")
    if isinstance(error, ConfigImportError) or name is None or module is None:
        error.add_note(f"while running the configuration file {place}{_missing_module(path, error)}")
        return error
    near = nearest_name(name[1], [one for one in vars(module) if one[0] != "_"])
    text = f"{place}: the module {error.name!r} ({module.__file__}) has no {name[1]!r}.{near}"
    return ConfigImportError(text, name=error.name, path=error.path)


def _missing_key(path: Path, error: ConfigAttributeError) -> ConfigKeyError:
    """The error of a key that a section or a lazy call does not have, with the nearest one."""
    step, where = _step_in(path, error), f"{path}{_line_in(path, error)}: {error.full_key}"
    if isinstance(error.parent_node, ListConfig):
        section = str(error.full_key).removesuffix(f"[{error.key}]")
        return ConfigKeyError(f"{where}: {section} is a list. Write {section}[0].{error.key} for its first item.")
    names = [str(name) for name in error.parent_node or () if name != TARGET]
    if str(error.full_key) == f"train.{error.key}" and error.key in SECTIONS:
        return ConfigKeyError(f"{where}: no such key. {error.key} is a section of its own: write {error.key} = ...")
    hint = did_you_mean(str(error.key), names)
    if error.parent_node is not None and TARGET in error.parent_node and not nearest_name(str(error.key), names):
        hint = (
            f"A LazyCall has only the arguments of the call ({', '.join(names) or 'none'}), not what its object has:"
            " the run builds it later. The run also gives the optimizer the model's parameters, without params=, and"
            " moves the model to its device: leave such lines out."
        )
        if written := _lazy_optimizer(getattr(step, "line", "")):
            hint = f"The run gives the optimizer the model's parameters. Write optim = {written}."
    return ConfigKeyError(f"{where}: no such key. {hint}")


def _lazy_optimizer(line: str) -> str:
    """The lazy call of an optimizer that the line builds with the parameters of a model; "" if it does not."""
    try:
        (statement,) = ast.parse(line).body
    except (SyntaxError, ValueError):  # one line of several
        return ""
    call = statement.value if isinstance(statement, ast.Assign) else None
    if not isinstance(call, ast.Call) or not call.args or not ast.unparse(call.args[0]).endswith(".parameters()"):
        return ""
    arguments = [ast.unparse(one) for one in (*call.args[1:], *call.keywords)]
    return f"LazyCall({ast.unparse(call.func)})({', '.join(arguments)})"


def _compile(path: Path) -> CodeType:
    try:
        return compile(path.read_bytes(), str(path), "exec")
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}: {(error.text or '').strip()!r}" if isinstance(error, SyntaxError) else ""
        raise ConfigSyntaxError(
            f"Config file {path} has syntax error!{line} ({getattr(error, 'msg', error)})"
        ) from error


def _run(path: Path) -> dict[str, Any]:
    """Run a config file, or a file that it imports.

    The files get their own builtins with another ``__import__``. Python's ``__import__`` does not change, so loads in
    several threads are independent, and a function of a file can still import when it is called after the load.
    """
    package = f"{_PACKAGE}{uuid.uuid4().hex[:8]}"
    namespace: dict[str, Any] = {
        "__builtins__": {**vars(builtins), "__import__": _import},
        "__file__": str(path),
        "__name__": f"{package}.{path.stem}",
        "__package__": package,
    }
    code, above = _compile(path), _running.get()
    if path in above:
        circle = " -> ".join(map(str, [*above[above.index(path) :], path]))
        raise ConfigImportError(
            f"{path}: configuration files import each other in a circle: {circle}. Move what they share into"
            " another file.",
            path=str(path),
        )
    token = _running.set((*above, path))
    try:
        exec(code, namespace)
    except ImportError as error:
        if (explained := _import_error(path, error)) is error:
            raise
        raise explained from error
    except ConfigAttributeError as error:
        raise _missing_key(path, error) from error
    except Exception as error:
        line, hint = _line_in(path, error), _without_lazy_call(path, error) or _not_there(path, error, namespace)
        error.add_note(f"while running the configuration file {path}{line}{hint}")
        raise
    finally:
        _running.reset(token)
    # A copy, because functions of the file use `namespace`, and imports from C code look for its builtins.
    return {name: value for name, value in namespace.items() if name != "__builtins__"}


def _import(
    name: str,
    globals: Mapping[str, Any] | None = None,
    locals: Mapping[str, Any] | None = None,
    fromlist: Sequence[str] | None = (),
    level: int = 0,
) -> Any:
    if not level or not str((globals or {}).get("__name__", "")).startswith(_PACKAGE):
        return builtins.__import__(name, globals, locals, fromlist or (), level)
    assert globals is not None
    return SimpleNamespace(**_import_by_path(Path(globals["__file__"]), name, level, fromlist or ()))


def _import_by_path(importer: Path, name: str, level: int, fromlist: Sequence[str]) -> dict[str, Any]:
    statement = f"from {'.' * level}{name} import {', '.join(fromlist)}"
    place = importer.parents[level - 1].joinpath(*name.split("."))
    file = place.with_name(place.name + ".py")
    if not name or (place.is_dir() and not file.is_file()):
        raise ConfigImportError(
            f"{importer}: {statement!r} names the folder {place}. Relative import of folders is not allowed in a "
            "config file: import from the .py file itself."
        )
    if not file.is_file():
        raise ConfigImportError(f"{importer}: cannot do {statement!r}: {file} does not exist.", path=str(file))
    values = _run(file)
    for key in values.get("__all__", [n for n in values if n[0] != "_"]) if "*" in fromlist else fromlist:
        if key not in values:
            raise ConfigImportError(f"{importer}: cannot do {statement!r}: {file} defines no {key!r}.", path=str(file))
        values[key] = as_node(values[key], key, file)
    return values


def _forget_settings(names: set[str], folder: Path) -> None:
    """Forget those modules of a folder that hold only settings: another class would be a second, different one."""
    for name in sorted(names, key=lambda name: -name.count(".")):
        module = sys.modules.get(name)
        file = getattr(module, "__file__", None)
        places = [Path(place).resolve() for place in ([file] if file else getattr(module, "__path__", ()))]
        is_own = all(place.is_relative_to(folder) and "site-packages" not in place.parts for place in places)
        is_package = any(other.startswith(name + ".") for other in list(sys.modules))  # of a module that stays
        if not places or not is_own or is_package:
            continue  # and look at no value of it: some of torch warn when their type is asked for
        code = [value for value in vars(module).values() if inspect.isclass(value) or inspect.isfunction(value)]
        if all(value.__module__ != name for value in code):
            del sys.modules[name]
