"""What data may call: a string target from YAML, a checkpoint or the command line resolves only inside trusted modules.

The module of the *resolved* object decides, not the path walked: ``torch.os.system`` is a function of ``posix``.
Trusted are trainwright, the building blocks of torch, the project's own files, and what ``allow_module`` adds. A Python
configuration file is code, so what it names is not asked about.
"""

import importlib.util
import inspect
import logging
import os
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from omegaconf import DictConfig

from trainwright.config.dotted import locate
from trainwright.config.errors import ConfigError
from trainwright.config.lookup import try_get_key

logger = logging.getLogger("trainwright.config")

# torch as a whole is no safe ground: torch.load and torch.hub run pickles, torch.utils.cpp_extension runs compilers,
# torch.utils.benchmark.Timer runs strings. These are the parts that a run is built of.
_TORCH = (
    "torch.nn",
    "torch.optim",
    "torch.utils.data.dataset",
    "torch.utils.data.dataloader",
    "torch.utils.data.sampler",
    "torch.utils.data.distributed",
    "torch.utils.data._utils.collate",
    "torch.distributions",
    "torch.functional",
    "torch.random",
    "torch._C._nn",
    "torch._C._linalg",
    "torch._C._special",
    "torch._C._fft",
)
# Plain functions and classes of the top module; torch.compile and the like are not among them.
_TORCH_TOP = frozenset({"Tensor", "Size", "device", "Generator", "tensor", "as_tensor"})
_TORCH_FILES = frozenset({"from_file", "from_buffer"})
# Rooms of trainwright that load files of code or widen this very rule.
_OWN_EXCEPT = ("trainwright.config", "trainwright.cli")
# Modules whose functions reach the system, run code or read pickles. Nothing allows them.
_NEVER_WORDS = """
    _ctypes _frozen_importlib _frozen_importlib_external _imp _io _operator _pickle _posixsubprocess _socket
    _thread asyncio bdb builtins cProfile cffi cloudpickle cmd code codeop compileall concurrent ctypes dill
    distutils doctest ensurepip faulthandler fileinput ftplib functools gc http imaplib importlib inspect io
    joblib linecache marshal multiprocessing nt operator os pathlib pdb pickle pickletools pip pkgutil poplib
    posix pprint profile pty py_compile runpy sched setuptools shelve shutil signal site smtplib socket
    socketserver ssl subprocess sys sysconfig tempfile threading timeit trace types unittest urllib venv
    webbrowser xmlrpc zipapp zipimport
"""
_NEVER = frozenset(_NEVER_WORDS.split())
_THIRD_PARTY = ("site-packages", "dist-packages")

_allowed_modules: set[str] = set()
_allowed_folders: set[Path] = set()


def allow_module(name: str) -> None:
    """Let strings in YAML, checkpoints and overrides name targets of the module ``name`` and the modules below it."""
    if not name or not all(part.isidentifier() for part in name.split(".")):
        raise ConfigError(f"allow_module: {name!r} is not the name of a module, such as 'torchvision.transforms'.")
    if name.split(".")[0] in _NEVER:
        raise ConfigError(
            f"allow_module: {name!r} is never allowed, since data that names its functions could run anything. "
            "Name the target in a Python configuration file instead."
        )
    _allowed_modules.add(name)


def project_root(config_file: str | os.PathLike[str]) -> Path:
    """The folder of the project that ``config_file`` belongs to.

    Its own folder, or the parent if that is called ``configs``.
    """
    folder = Path(config_file).resolve().parent
    return folder.parent if folder.name == "configs" else folder


def project_roots(config_file: str | os.PathLike[str], cfg: Any = None) -> list[Path]:
    """The folders whose modules are the project's own: the project root and the working folder.

    A ``config.yaml`` that a run saved names the project root in its top-level key ``project_root``, relative to the
    file's folder. That is honoured when it lies inside the working folder, so that a file from elsewhere cannot point
    at code.
    """
    working = Path.cwd().resolve()
    root = project_root(config_file)
    named = try_get_key(cfg, "project_root") if isinstance(cfg, dict | DictConfig) else None
    if isinstance(named, str):
        there = (Path(config_file).resolve().parent / named).resolve()
        if there.is_relative_to(working):
            root = there
        else:
            logger.warning(
                "%s: project_root %r is outside the working folder %s and is ignored. Start from the project's folder "
                "to use its modules.",
                config_file,
                named,
                working,
            )
    return list(dict.fromkeys([root, working]))


def use_project(config_file: str | os.PathLike[str], cfg: Any = None) -> list[Path]:
    """Put the project's folders first on ``sys.path`` and trust the modules in them. Calling it again adds nothing."""
    roots = project_roots(config_file, cfg)
    for root in reversed(roots):
        if str(root) not in sys.path:
            sys.path.insert(0, str(root))
    _allowed_folders.update(roots)
    return roots


def locate_untrusted(path: str, *, config_file: Path | None = None) -> Any:
    """The object at ``path`` if data may name it. No module outside the trusted ones is imported to find out.

    Raises:
        ConfigError: data may not name it.
        ConfigImportError: there is no such object.
    """
    folders = {Path.cwd().resolve(), *_allowed_folders}
    if config_file is not None:
        folders.add(project_root(config_file))
    first = path.split(".")[0]
    if first in _NEVER or any(part.startswith("__") and part != "__main__" for part in path.split(".")):
        raise _refusal(path)
    if not (first in {"trainwright", "torch"} or _is_allowed(first) or _is_of_project(first, folders)):
        raise _refusal(path)
    target = locate(path)
    if isinstance(target, ModuleType) or not _may_be_called(target, folders):
        raise _refusal(path)
    return target


def _may_be_called(target: Any, folders: Iterable[Path]) -> bool:
    module = getattr(target, "__module__", None)
    if inspect.isbuiltin(target) and module is None and isinstance(target.__self__, ModuleType):
        module = target.__self__.__name__
    name = getattr(target, "__qualname__", "")
    if not isinstance(module, str):
        # torch.zeros and its like: built-in, without a module, owned by one class of torch's.
        return name.startswith("_VariableFunctionsClass.") and name.rpartition(".")[2] not in _TORCH_FILES
    if module.split(".")[0] in _NEVER:
        return False
    if any(_is_below(module, allowed) for allowed in _allowed_modules):
        return True
    if _is_below(module, "trainwright"):
        return not any(_is_below(module, room) for room in _OWN_EXCEPT)
    if _is_below(module, "torch"):
        return _is_building_block(module, name)
    return _is_of_project(module, folders)


def _is_building_block(module: str, name: str) -> bool:
    if module in {"torch", "torch._C"}:
        owner, _, last = name.rpartition(".")
        is_function_on_tensors = owner == "_VariableFunctionsClass" and last not in _TORCH_FILES
        return name in _TORCH_TOP or is_function_on_tensors
    return any(_is_below(module, part) for part in _TORCH)


def _is_below(module: str, root: str) -> bool:
    return module == root or module.startswith(root + ".")


def _is_allowed(first: str) -> bool:
    return any(name.split(".")[0] == first for name in _allowed_modules)


def _is_of_project(module: str, folders: Iterable[Path]) -> bool:
    """Whether the files of ``module`` lie in ``folders`` and are neither the standard library's nor installed."""
    loaded = sys.modules.get(module)
    spec = getattr(loaded, "__spec__", None)
    if loaded is not None and getattr(loaded, "__file__", None):
        places = [str(loaded.__file__)]
    else:
        # A top-level name is looked up without importing it; a submodule is asked about only after it was imported.
        if loaded is None and "." not in module:
            try:
                spec = importlib.util.find_spec(module)
            except (ValueError, ImportError):
                return False
        if spec is None:
            return False
        places = [spec.origin] if spec.has_location and spec.origin else list(spec.submodule_search_locations or ())
    return bool(places) and all(_is_project_file(Path(place).resolve(), folders) for place in places)


def _is_project_file(file: Path, folders: Iterable[Path]) -> bool:
    if any(part in _THIRD_PARTY for part in file.parts):
        return False
    if file.is_relative_to(Path(sysconfig.get_path("stdlib")).resolve()):
        return False
    return any(file.is_relative_to(folder) for folder in folders)


def _refusal(path: str) -> ConfigError:
    if path.split(".")[0] in _NEVER:
        return ConfigError(
            f"target {path!r} is refused: data may never name a function of that module, which could run anything. "
            "Name the target in a Python configuration file instead."
        )
    return ConfigError(
        f"target {path!r} is refused: a string from YAML, a checkpoint or the command line may name only trainwright, "
        "the building blocks of torch (nn, optim, utils.data, functions on tensors) and the project's own modules. "
        "If you trust its module, pass --allow-module NAME (in code: trainwright.config.trust.allow_module), or "
        "name the "
        "target in a Python configuration file."
    )
