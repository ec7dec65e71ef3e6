"""The user's module inside of data-parallel and compiled wrappers, and its state under names without them."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel


def from_outside_in(model: nn.Module) -> Iterator[nn.Module]:
    """``model`` and what is inside it, as long as it is a wrapper. The last one is the user's."""
    yield model
    inner = model.module if isinstance(model, nn.DataParallel | DistributedDataParallel) else None
    inner = getattr(model, "_orig_mod", None) if inner is None else inner  # torch.compile's wrapper
    if isinstance(inner, nn.Module):
        yield from from_outside_in(inner)


def unwrap(model: nn.Module) -> nn.Module:
    """The user's module; its parameter names have no prefix."""
    *_, module = from_outside_in(model)
    return module


def plain_name(name: str) -> str:
    """The name of a weight without the parts of ``torch.compile`` around a submodule.

    >>> plain_name("encoder._orig_mod.weight")
    'encoder.weight'
    """
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def model_state(model: nn.Module, *, keep_vars: bool = False) -> dict[str, Any]:
    """The state of the user's module, compiled or not: the names are the same."""
    return {plain_name(name): value for name, value in unwrap(model).state_dict(keep_vars=keep_vars).items()}


def load_model_state(model: nn.Module, state: Mapping[str, Any], **settings: bool) -> None:
    """``load_state_dict`` of the user's module with names of :func:`model_state`."""
    module = unwrap(model)
    own = {plain_name(name): name for name in module.state_dict()}
    module.load_state_dict({own.get(name, name): value for name, value in state.items()}, **settings)
