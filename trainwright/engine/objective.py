"""How a batch becomes a loss: the model returns its losses, and everything whose name contains "loss" is summed."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainwright.config.errors import ConfigError, ConfigTypeError, did_you_mean
from trainwright.data.collate import add_batch_note

WRONG_FIELDS_HELP = "A sample's field names must be the parameter names of the model's forward."


def sum_losses(outputs: Any, batch: Any = None) -> Tensor:
    """The total loss of what a model returned: the sum of the entries whose name contains "loss", a 0-dim tensor.

    ``batch`` is what it returned them for. It is not looked at: only how micro-batches are weighed depends on it.

    Raises:
        ConfigTypeError: ``outputs`` is not a dict.
        ConfigError: no entry's name contains "loss", or a loss is not a single number with a gradient (outside of
            ``no_grad``).
    """
    if not isinstance(outputs, Mapping):
        raise ConfigTypeError(
            f"The model's forward returned {type(outputs).__name__}; in training it must return a dict with its losses,"
            ' for example {"loss": loss}.'
        )
    losses = {name: value for name, value in outputs.items() if "loss" in name and value is not None}
    if not losses:
        raise ConfigError(
            f"The model's forward returned {_names(outputs)}; in training at least one name must contain 'loss'."
            " (A model that tells training from evaluation looks at self.training.)"
        )
    total: Any = next(iter(losses.values())) if len(losses) == 1 else sum(losses.values())
    is_cut_off = torch.is_grad_enabled() and not getattr(total, "requires_grad", False)
    if not isinstance(total, Tensor) or total.numel() != 1 or is_cut_off:
        raise _refusal(losses)
    return total


def explain_forward(error: Exception, model: nn.Module, batch: Any) -> None:
    """Add to an error of a step what its batch was; raise a clear one where the batch does not fit the model."""
    if isinstance(error, TypeError):
        write_forward_help(error, model, batch)
    add_batch_note(error, batch)


def write_forward_help(error: TypeError, model: nn.Module, batch: Any, shown: list[str] | None = None) -> None:
    """Raise a clear error in place of ``error`` when it came from calling ``model`` with a batch it does not fit.

    ``shown``: the fields that the message tells, where ``batch`` is a part of them.
    """
    if not isinstance(batch, Mapping):
        raise ConfigTypeError(
            f"The loader gives {type(batch).__name__}; this door needs named fields: an Instance or a dict for each"
            f" sample. {WRONG_FIELDS_HELP}"
        ) from error
    signature = inspect.signature(model.forward)
    try:
        signature.bind(**batch)
    except TypeError as mismatch:
        fields, parameters = shown or list(batch), list(signature.parameters)
        near = "; ".join(
            f"{name!r} is no parameter. {did_you_mean(name, parameters)}" for name in fields if name not in parameters
        )
        raise ConfigTypeError(
            f"{type(model).__name__}.forward{signature} does not take the batch with the fields {fields}: {mismatch}."
            f" {WRONG_FIELDS_HELP}{' ' + near if near else ''}"
        ) from error


def _refusal(losses: Mapping[str, Any]) -> ConfigError | ConfigTypeError:
    for name, value in losses.items():
        if not isinstance(value, Tensor):
            return ConfigTypeError(f"The model's {name!r} is {type(value).__name__}; a loss must be a tensor.")
        if value.numel() != 1:
            shape = tuple(value.shape)
            return ConfigError(f"The model's {name!r} has shape {shape}; a loss must be one number, say its .mean().")
    return ConfigError(
        f"The model's {_names(losses)} cannot be differentiated: no trainable parameter leads to it"
        " (detached, computed without gradients, or everything is frozen)."
    )


def _names(mapping: Mapping[str, Any]) -> str:
    return ", ".join(repr(name) for name in mapping) or "an empty dict"
