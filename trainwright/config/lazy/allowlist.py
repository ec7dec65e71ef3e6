"""The allowlist: targets from YAML, a checkpoint or the command line resolve only to trusted objects.

The module that defines the object decides, not the path: ``torch.os.system`` is a function of ``posix``. Trusted are
the building blocks of trainwright and torch, the modules of the project, and those added by ``allow_module``; names
that start with ``_`` are never trusted. Targets in a Python config file are not checked, because the file is code.

What a command is given, a run or a YAML file, is data, and so is what lies beside it, whatever it contains or names.
The modules of the project come from the folder that the user works in: nothing in it where the data are, and nothing at
all if the user works inside of them. ``--trust-folder`` adds the folder of the file and the project root that it names.
"""

import importlib
import importlib.util
import inspect
import os
import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from omegaconf import DictConfig

from trainwright.base.errors import ConfigError, nearest_name
from trainwright.config.lazy.provenance import shown
from trainwright.config.lazy.targets import locate

# Packages of trainwright whose public classes are allowed. The object itself is allowed, so its other paths are, too
# (trainwright.optim.schedules.WarmupCosineLR); its methods are not.
_OWN_CLASSES = (
    "trainwright.data",
    "trainwright.data.datasets",
    "trainwright.data.transforms",
    "trainwright.evaluation",
    "trainwright.models",
    "trainwright.optim",
)

# Single names. Not listed: functions that instantiate or return their arguments (build_optimizer, build_lr_scheduler,
# to_batch).
_OWN_NAMES = (
    "trainwright.engine.GraphBase",
    "trainwright.config.torch_names.torch_dtype",
    "trainwright.data.collate",
    "trainwright.optim.get_default_optimizer_params",
    "trainwright.optim.reduce_param_groups",
    # Of the callbacks and hooks those that write no file and call no function of their arguments.
    "trainwright.hooks.EarlyStoppingCallback",
    "trainwright.hooks.PrintCallback",
    "trainwright.hooks.DeterministicAlgorithms",
    "trainwright.hooks.Float32MatmulPrecision",
)

# These instantiate nodes in their arguments. Data may call them, but not as a partial: when that is called later, it is
# no longer known that the arguments are data.
_OWN_BUILDERS = (
    "trainwright.data.build_image_train_loader",
    "trainwright.data.build_image_test_loader",
    "trainwright.data.build_nlp_train_val_test_loader",
)

_TORCH_CLASSES = (
    "torch.nn",
    "torch.optim",
    "torch.distributions",
    "torch.utils.data.dataset",
    "torch.utils.data.dataloader",
    "torch.utils.data.sampler",
    "torch.utils.data.distributed",
)

_TORCH_FUNCTIONS = (
    "torch.nn.functional",
    "torch.nn.init",
    "torch.nn.utils.rnn",  # the other functions of torch.nn.utils modify the modules that they are called with
    "torch.functional",
    "torch._C._nn",
    "torch._C._linalg",
    "torch._C._special",
    "torch._C._fft",
    "torch.utils.data._utils.collate",
)

_TORCH_NAMES = {
    "torch": {"Tensor", "Size", "device", "Generator", "tensor", "as_tensor"},
    "torch._C": {"Size", "device", "Generator"},
    "torch.random": {"manual_seed"},
    "torch.utils.data.dataset": {"random_split"},
}

# Functions of torch that read files or foreign memory.
_TORCH_FILES = frozenset({"from_file", "from_buffer", "frombuffer"})


def _is_trainwright_target(target: Any, *, partial: bool) -> bool:
    if inspect.isclass(target) and any(_is_public(target, package) for package in _OWN_CLASSES):
        return True
    name = getattr(target, "__name__", "")
    if name.startswith("configure_"):
        return _is_public(target, "trainwright.optim")
    names = _OWN_NAMES if partial else (*_OWN_NAMES, *_OWN_BUILDERS)
    return any(path.endswith(f".{name}") and locate(path) is target for path in names)


def _is_torch_target(target: Any, parent: Any, module: Any) -> bool:
    """Whether data may name this object of torch, an attribute of ``parent``. Methods are not allowed."""
    if not isinstance(parent, ModuleType):
        return False
    name = getattr(target, "__qualname__", "")
    owner, _, last = name.rpartition(".")
    if module in (None, "torch", "torch._C") and owner == "_VariableFunctionsClass":  # such as torch.zeros
        return last not in _TORCH_FILES
    if not isinstance(module, str):
        return False
    if name in _TORCH_NAMES.get(module, ()):
        return True
    if inspect.isclass(target):
        return _is_below(module, *_TORCH_CLASSES)
    return inspect.isroutine(target) and module in _TORCH_FUNCTIONS


def _is_below(module: str, *roots: str) -> bool:
    return any(module == root or module.startswith(root + ".") for root in roots)


def _is_public(target: Any, package: str) -> bool:
    """Whether ``target`` is a public name of ``package``; without ``__all__``, it must be defined there."""
    name, module = target.__name__, importlib.import_module(package)
    names = getattr(module, "__all__", [name] if target.__module__ == package else [])
    return name[0] != "_" and name in names and getattr(module, name, None) is target


# Modules whose functions access the system, run code or read pickles. They cannot be allowed.
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

# Plain containers of their arguments.
PLAIN_CONTAINERS: dict[str, Any] = {f"builtins.{kind.__name__}": kind for kind in (dict, list, tuple, set, frozenset)}

_THIRD_PARTY = ("site-packages", "dist-packages")
_allowed_modules: set[str] = set()
_code_folders: set[Path] = set()  # of Python config files, and of --trust-folder
_data_folders: set[Path] = set()  # of YAML files that commands were given
_suggested: dict[Path, Path] = {}  # the project root that a YAML file names


def allow_module(name: str) -> None:
    """Allow targets in YAML, checkpoints and overrides to name objects of the module ``name`` and its submodules."""
    if not name or not all(part.isidentifier() for part in name.split(".")):
        raise ConfigError(f"allow_module: {name!r} is not the name of a module, such as 'torchvision.transforms'.")
    if name.split(".")[0] in _NEVER:
        raise ConfigError(
            f"allow_module: {name!r} cannot be allowed, because data that names its functions could run any code."
            " Name the target in a Python config file instead."
        )
    _allowed_modules.add(name)


def project_root(config_file: str | os.PathLike[str]) -> Path:
    """The project root of ``config_file``: its folder, or the parent of a folder called ``configs``."""
    folder = Path(config_file).resolve().parent
    return folder.parent if folder.name == "configs" else folder


def working_folder() -> list[Path]:
    """The working folder in a list, which is empty if the folder has been deleted."""
    try:
        return [Path.cwd().resolve()]
    except FileNotFoundError:
        return []


def project_roots(config_file: str | os.PathLike[str], cfg: Any = None, *, trusts_folder: bool = False) -> list[Path]:
    """The folders whose modules are the project's own for a command with this file.

    Of a Python file, which is code: its project root and the working folder. Of a YAML file: the working folder, unless
    that is the folder of the file or inside of it. ``trusts_folder`` adds the folder of the file, and first the root
    that a saved ``config.yaml`` names in its key ``project_root``, relative to its folder.
    """
    own = project_root(config_file)
    if Path(config_file).suffix == ".py":
        return list(dict.fromkeys([own, *working_folder()]))
    named = named_root(config_file, cfg)
    if trusts_folder:
        return list(dict.fromkeys([*([] if named is None else [named]), own, *working_folder()]))
    return [here for here in working_folder() if not _lies_in(here, _folders_of(config_file))]


def named_root(config_file: str | os.PathLike[str], cfg: Any) -> Path | None:
    """The project root that a saved configuration names: a suggestion to the user."""
    named = cfg.get("project_root") if isinstance(cfg, dict | DictConfig) else None
    return (Path(config_file).resolve().parent / named).resolve() if isinstance(named, str) else None


def use_project(config_file: str | os.PathLike[str], cfg: Any = None, *, trusts_folder: bool = False) -> list[Path]:
    """Trust the modules of the project, and put its folders last on ``sys.path``. A second call changes nothing."""
    roots = project_roots(config_file, cfg, trusts_folder=trusts_folder)
    if trusts_folder or Path(config_file).suffix == ".py":
        _code_folders.update(roots)
    else:
        _data_folders.update(_data_of(config_file))
        if (named := named_root(config_file, cfg)) is not None:
            _suggested[Path(config_file).resolve()] = named
    for folder in working_folder():
        if folder not in roots:  # python -m puts it first
            sys.path[:] = [entry for entry in sys.path if entry not in ("", str(folder))]
    for root in roots:
        if str(root) not in sys.path:
            sys.path.append(str(root))
    return roots


def _folders_of(file: str | os.PathLike[str]) -> set[Path]:
    """The folder of a file, and the one of the file that it may be a link to."""
    return {Path(file).parent.resolve(), Path(file).resolve().parent}


def _data_of(config_file: str | os.PathLike[str]) -> set[Path]:
    """The folders with the given file and what lies beside it.

    In the working folder, that is its complete subfolder: an archive that was unpacked there may have code anywhere.
    """
    found = _folders_of(config_file)
    for here in working_folder():
        inside = {folder for folder in found if folder != here and folder.is_relative_to(here)}
        found |= {here / folder.relative_to(here).parts[0] for folder in inside}
    return found


def is_data(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder is in what a command was given, without ``--trust-folder``: no program of it may run."""
    place = Path(folder).resolve()
    return _lies_in(place, _data_folders) and not _lies_in(place, _code_folders)


def _lies_in(place: Path, folders: Iterable[Path]) -> bool:
    return any(map(place.is_relative_to, folders))


@dataclass(frozen=True, slots=True)
class _Project:
    """Where the modules of the project are."""

    code: frozenset[Path]
    data: frozenset[Path]  # in a folder of the code, these are none

    @classmethod
    def of(cls, config_file: Path | None) -> "_Project":
        """``config_file``: of the name that is looked up."""
        code, data, here = set(_code_folders), set(_data_folders), working_folder()
        if config_file is not None and config_file.suffix == ".py":
            code.add(project_root(config_file))
        elif config_file is not None:  # a program of the user's may have loaded it, from its own folder or one above
            data |= {folder for folder in _data_of(config_file) if folder not in here and _lies_in(folder, here)}
        code.update(folder for folder in here if not _lies_in(folder, data))
        return cls(frozenset(code), frozenset(data))

    def holds(self, file: Path) -> bool:
        if _is_of_library(file):
            return False
        return any(
            file.is_relative_to(folder)
            and not any(file.is_relative_to(data) and data.is_relative_to(folder) for data in self.data - {folder})
            for folder in self.code
        )


def locate_untrusted(path: str, *, config_file: Path | None = None, partial: bool = False) -> Any:
    """The object at ``path`` if data may name it. Only trusted modules are imported to check this.

    ``partial``: the object is called later, by the code that receives it.
    """
    if path in PLAIN_CONTAINERS and not partial:  # called later, dict() could make data look like code
        return PLAIN_CONTAINERS[path]
    project = _Project.of(config_file)
    first = path.split(".")[0]
    if is_never_named(path):
        raise _refusal(path)
    is_allowed = any(name.split(".")[0] == first for name in _allowed_modules)
    if not (first in {"trainwright", "torch"} or is_allowed or _leads_into_project(path, project)):
        raise _refusal(path, config_file)
    target = locate(path)
    above = path.rpartition(".")[0]
    parent = locate(above) if above else None
    if isinstance(target, ModuleType) or not _may_be_called(target, parent, project, partial=partial):
        raise _refusal(path)
    return target


def is_never_named(path: str) -> bool:
    """Whether data may never name ``path``: a private name, or one of a module that can run code."""
    first, *rest = path.split(".")
    if path in PLAIN_CONTAINERS:
        return False
    is_private = any(part.startswith("_") for part in (first, *rest) if part != "__main__" or part is not first)
    return first in _NEVER or is_private


def _may_be_called(target: Any, parent: Any, project: _Project, *, partial: bool) -> bool:
    module = getattr(target, "__module__", None)
    if inspect.isbuiltin(target) and module is None and isinstance(target.__self__, ModuleType):
        module = target.__self__.__name__
    if not isinstance(module, str):  # such as torch.zeros have none
        return _is_torch_target(target, parent, module)
    if module.split(".")[0] in _NEVER:
        return False
    if _is_below(module, *_allowed_modules):
        return True
    if _is_below(module, "trainwright"):
        return _is_trainwright_target(target, partial=partial)
    if _is_below(module, "torch"):
        return _is_torch_target(target, parent, module)
    return _is_of_project(module, project)


def _leads_into_project(path: str, project: _Project) -> bool:
    """Whether each module of a dotted path is the project's. A module is imported after its place has been checked."""
    parts = path.split(".")
    for length in range(1, len(parts)):
        module = ".".join(parts[:length])
        if not _is_of_project(module, project):
            # A name that is no module is one in the module before it; the object that it names is checked.
            return length > 1 and module not in sys.modules and importlib.util.find_spec(module) is None
        if not hasattr(locate(module), "__path__"):
            break
    return len(parts) > 1


def _is_of_project(module: str, project: _Project) -> bool:
    places = _files_of(module)
    return bool(places) and all(map(project.holds, places))


def _is_installed(module: str) -> bool:
    """Whether a top-level module is of the standard library, or of an installed package."""
    try:
        spec = importlib.util.find_spec(module)
    except (ValueError, ImportError):
        return True
    return spec is not None and all(map(_is_of_library, _files_of(module)))


def _files_of(module: str) -> list[Path]:
    """The file of a module, or the folders of a package without one; none for a module of Python itself."""
    loaded = sys.modules.get(module)
    if (file := getattr(loaded, "__file__", None)) is not None:
        places = [file]
    else:
        try:  # without importing it; of a submodule, the modules above it are imported and checked already
            spec = importlib.util.find_spec(module) if loaded is None else getattr(loaded, "__spec__", None)
        except (ValueError, ImportError):
            return []
        if spec is None:
            return []
        places = [spec.origin] if spec.has_location and spec.origin else list(spec.submodule_search_locations or ())
    return [Path(place).resolve() for place in places]


def _is_of_library(file: Path) -> bool:
    is_third_party = any(part in _THIRD_PARTY for part in file.parts)
    return is_third_party or file.is_relative_to(Path(sysconfig.get_path("stdlib")).resolve())


def _refusal(path: str, config_file: Path | None = None) -> ConfigError:
    if path.split(".")[0] in _NEVER:
        return ConfigError(
            f"target {path!r} is refused: data may never name a function of this module, because it could run any code."
            " Name the target in a Python config file instead."
        )
    if is_never_named(path):
        return ConfigError(
            f"target {path!r} is refused: data may only use public names, and a part of this name starts with '_'. Use "
            "a public name, or name the target in a Python config file."
        )
    if path.isidentifier():
        return ConfigError(
            f"got {path!r}, without its module. Write it before the name, such as torch.optim.AdamW, or my_file.Net for"
            " a class of yours."
        )
    if config_file is not None and not _is_installed(first := path.split(".")[0]):
        roots = [here for here in working_folder() if not _lies_in(here, _data_folders)]
        file, names = shown(str(config_file)), [entry.stem for folder in roots for entry in folder.iterdir()]
        why = (
            f"the folder that you work in has no module {first!r} outside of the data.{nearest_name(first, names)}"
            if roots
            else f"{file} is data, and so is the folder that you work in, which holds it."
        )
        do, folder, more = "Start in the project's folder", shown(str(config_file.parent)), ""
        if (named := _suggested.get(config_file.resolve())) is not None:
            do, more = f"{do} (the file says: {named})", f" and in {named}"
        elif not roots:
            do = "Move it into a folder of its own, such as configs"
        folder = "this folder" if folder == "." else folder
        return ConfigError(
            f"target {path!r} is refused: {why} {do}, or add --trust-folder if you trust the code in {folder}{more}."
        )
    return ConfigError(
        f"target {path!r} is refused: a string from YAML, a checkpoint or the command line may only name the parts of "
        "a run: trainwright's loaders, samplers, datasets, transforms, schedules and evaluators, torch's classes "
        "(nn, optim, utils.data, distributions) and functions on tensors, and the modules of the project. If you trust "
        "its module, pass --allow-module NAME (in code: trainwright.config.lazy.allowlist.allow_module), or name the "
        "target in a Python config file."
    )
