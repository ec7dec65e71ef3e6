"""Optimizers, losses and dtypes by the names that torch gives them. Torch is imported when a name is looked up."""

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainwright.config.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    import torch

_SET_BY_TRAINER = {"optimizer": ("params",), "loss": ()}


def split_name(value: str | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The name and the arguments of ``"Adam"`` or ``{"name_": "Adam", "eps": 1e-6}``."""
    if isinstance(value, str):
        return value, {}
    return str(value.get("name_", "")), {key: item for key, item in value.items() if key != "name_"}


def find_torch_class(kind: str, value: str | Mapping[str, Any]) -> tuple[type[Any] | None, str | None]:
    """The class that ``value`` names, or what is wrong with the name. ``kind``: "optimizer" or "loss"."""
    name, _ = split_name(value)
    classes = _classes(kind)
    found = next((known for known in classes if known.lower() == name.lower()), None)
    if found is None:
        return None, f"got {value!r}. {did_you_mean(name, classes)}"
    return classes[found], None


def arguments_fault(kind: str, value: str | Mapping[str, Any]) -> str | None:
    """What is wrong with the arguments beside the name; None if nothing is."""
    found, _ = find_torch_class(kind, value)
    assert found is not None, "asked only for a name that was found"
    _, arguments = split_name(value)
    allowed = [name for name in inspect.signature(found).parameters if name not in _SET_BY_TRAINER[kind]]
    for name in arguments:
        if name not in allowed:
            return f"{found.__name__} has no argument {name!r}. {did_you_mean(str(name), allowed)}"
    if arguments.get("reduction", "mean") != "mean":
        return f"got reduction={arguments['reduction']!r}; the loss of a batch must be the mean over it."
    return None


def torch_dtype(name: str) -> "torch.dtype":
    """The type of numbers that torch calls ``name``: how a saved configuration spells ``torch.float16``."""
    import torch

    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        known = [key for key, value in vars(torch).items() if isinstance(value, torch.dtype)]
        raise ConfigError(f"torch_dtype: got {name!r}; it must be a torch.dtype. {did_you_mean(str(name), known)}")
    return found


def _classes(kind: str) -> dict[str, type[Any]]:
    import torch

    if kind == "optimizer":
        base: type[Any] = torch.optim.Optimizer
        # LBFGS calls the model several times in each step, which no trainer of batches does.
        return _subclasses(torch.optim, base, but=("Optimizer", "LBFGS"))
    loss = torch.nn.modules.loss
    return {name: found for name, found in _subclasses(loss, loss._Loss).items() if not name.startswith("_")}


def _subclasses(module: Any, base: type[Any], but: tuple[str, ...] = ()) -> dict[str, type[Any]]:
    found = vars(module).items()
    return {n: c for n, c in found if isinstance(c, type) and issubclass(c, base) and n not in but}
