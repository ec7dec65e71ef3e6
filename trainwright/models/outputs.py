"""What a model returns, by name."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

TOKENS = "num_tokens"  # entry of a model's training outputs: the number of tokens that its losses average


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


def losses_of(outputs: Any) -> Mapping[str, Any] | None:
    """The losses that a model returned, by name, among its other outputs; None if there are none."""
    named = outputs if type(outputs) is dict else named_outputs(outputs)
    if named is not None:
        if named.get("loss") is not None or any("loss" in name and named[name] is not None for name in named):
            return named
        if isinstance(outputs, Mapping):
            return None
    first = outputs[0] if isinstance(outputs, tuple | list) and outputs else outputs
    return {"loss": first} if isinstance(first, Tensor) and first.dim() == 0 else None


def returned_losses(outputs: Any) -> Any:
    """The outputs of a model by name; unchanged if it returned no loss."""
    return outputs if type(outputs) is dict else losses_of(outputs) or outputs


def total_loss(outputs: Mapping[str, Any]) -> Any:
    """The loss of outputs by name: the entry ``loss`` alone, else the sum of the entries with "loss" in their names.

    None if there is no loss.
    """
    total = outputs.get("loss")
    if total is None:
        for name, value in outputs.items():
            if "loss" in name and value is not None:
                total = value if total is None else total + value
    return total


def predictions_of(outputs: Any) -> Any:
    """The scores among a model's outputs: the output itself, or its entry ``logits``; None if there are none."""
    if isinstance(outputs, Tensor):
        return outputs if outputs.dim() else None  # a loss
    named = named_outputs(outputs)
    if named is not None and ("logits" in named or "prediction_scores" in named or not isinstance(outputs, tuple)):
        return named.get("logits", named.get("prediction_scores"))  # evaluators read the second
    if losses_of(outputs) is not None and isinstance(outputs, tuple | list):
        return outputs[1] if len(outputs) > 1 else None  # after its loss
    return None
