"""What of torch and of trainwright itself data may name: the parts that a run is built of, and nothing beside them.

Both are lists of what is allowed. Whole packages are no safe ground: torch.load reads pickles, torch.nn.Module.apply
calls what it is given, and our own checkpoint room deletes folders.
"""

import importlib
import inspect
from types import ModuleType
from typing import Any

# Rooms of trainwright: everything public of a kind, or single names. What is allowed is the object itself, so its
# longer paths are too (trainwright.optim.schedules.WarmupCosineLR); its methods are not.
_OWN_CLASSES = (
    "trainwright.data",
    "trainwright.data.datasets",
    "trainwright.data.transforms",
    "trainwright.evaluation",
    "trainwright.models",
)
_OWN_NAMES = {
    "trainwright.engine": {"GraphBase"},
    "trainwright.config.torch_names": {"torch_dtype"},
}
# Functions that build nodes which they are given, or that return what they are given, stay with the rooms that call
# them: build_optimizer, build_lr_scheduler, to_batch.
_OWN_FUNCTIONS = {
    "trainwright.data": {"collate"},
    "trainwright.optim": {"get_default_optimizer_params", "reduce_param_groups"},
}
# They build nodes among their arguments, at the time of the call. Data may call them, but not hand them on to be called
# later, when nobody knows any more that the arguments are data.
_OWN_BUILDERS = {
    "trainwright.data": {
        "build_image_train_loader",
        "build_image_test_loader",
        "build_nlp_train_loader",
        "build_nlp_test_loader",
        "build_nlp_train_val_test_loader",
    },
}

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
    "torch.nn.utils.rnn",  # of torch.nn.utils only these leave the modules alone that they are given
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
# Of the functions on tensors, those that reach a file or foreign memory.
_TORCH_FILES = frozenset({"from_file", "from_buffer", "frombuffer"})


def is_own_block(target: Any, *, partial: bool = False) -> bool:
    """Whether data may name this object of trainwright. ``partial``: to be called later, rather than now."""
    if inspect.isclass(target) and any(_is_public(target, room) for room in (*_OWN_CLASSES, "trainwright.optim")):
        return True
    tables = [_OWN_NAMES, _OWN_FUNCTIONS] if partial else [_OWN_NAMES, _OWN_FUNCTIONS, _OWN_BUILDERS]
    if any(_is_one_of(target, room, names) for table in tables for room, names in table.items()):
        return True
    name = getattr(target, "__name__", "")
    return name.startswith("configure_") and _is_public(target, "trainwright.optim")


def is_torch_block(target: Any, parent: Any) -> bool:
    """Whether data may name this object of torch, found in ``parent``. What is found in a class is a method: no."""
    if not isinstance(parent, ModuleType):
        return False
    module, name = getattr(target, "__module__", None), getattr(target, "__qualname__", "")
    if module is None and inspect.isbuiltin(target) and isinstance(target.__self__, ModuleType):
        module = target.__self__.__name__
    owner, _, last = name.rpartition(".")
    if module in (None, "torch", "torch._C") and owner == "_VariableFunctionsClass":  # torch.zeros and its like
        return last not in _TORCH_FILES
    if not isinstance(module, str):
        return False
    if name in _TORCH_NAMES.get(module, ()):
        return True
    if inspect.isclass(target):
        return is_below(module, *_TORCH_CLASSES)
    return inspect.isroutine(target) and module in _TORCH_FUNCTIONS


def is_below(module: str, *roots: str) -> bool:
    """Whether ``module`` is one of ``roots`` or lies in one of them."""
    return any(module == root or module.startswith(root + ".") for root in roots)


def _is_public(target: Any, room: str) -> bool:
    return _is_one_of(target, room, getattr(importlib.import_module(room), "__all__", None))


def _is_one_of(target: Any, room: str, names: Any) -> bool:
    """Whether ``target`` is the very object that ``room`` has under its name. A room without ``__all__`` has none."""
    name = getattr(target, "__name__", None)
    if not isinstance(name, str) or name.startswith("_"):
        return False
    module = importlib.import_module(room)
    if names is None:  # a file rather than a room: what it defines itself
        return getattr(target, "__module__", None) == room and vars(module).get(name) is target
    return name in names and getattr(module, name, None) is target
