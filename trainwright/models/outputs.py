"""What a model returns, by name."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor


def named_outputs(outputs: Any) -> Mapping[str, Any] | None:
    """The entries of a dict, a dataclass or a named tuple; None for other outputs."""
    if isinstance(outputs, Mapping):
        return outputs
    if isinstance(outputs, tuple) and hasattr(outputs, "_asdict"):
        named: dict[str, Any] = outputs._asdict()
        return named
    if is_dataclass(outputs) and not isinstance(outputs, type):
        return {field.name: getattr(outputs, field.name) for field in fields(outputs)}
    return None


def is_loss_alone(scalars: Mapping[str, Any]) -> bool:
    """Whether the only entry is a loss, which a trainer stores by its own name."""
    return len(scalars) == 1 and "loss" in next(iter(scalars))


def scalars_of(outputs: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers, and the real tensors of one element, among the entries."""
    found: dict[str, Any] = {}  # a call of dict[str, Any] cannot be compiled
    for name, value in outputs.items():
        if isinstance(value, Tensor):
            is_scalar = value.numel() == 1 and not value.is_complex()
        else:
            is_scalar = isinstance(value, int | float) and not isinstance(value, bool)
        if is_scalar:
            found[name] = value
    return found
