"""Build what changes the weights from a TrainingConfig: precision, criterion, optimizer and schedule."""

import inspect
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright._torch_compat.optimizer_import import without_compiler
from trainwright.config.errors import ConfigError
from trainwright.config.torch_names import CUSTOM
from trainwright.optim.fused import fused_arguments
from trainwright.parallel.dist import gather_over_pipeline, get_tensor_parallel_size
from trainwright.parallel.precision import autocast_and_scaler

if TYPE_CHECKING:
    from trainwright.config.settings import TrainingConfig

logger = logging.getLogger("trainwright.engine")

Autocast = Callable[[], torch.autocast]  # builds the context of one call: contexts may be nested

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def precision_of(config: "TrainingConfig", device: torch.device) -> tuple[Autocast | None, torch.amp.GradScaler | None]:
    """What builds the context of ``config.mixed_precision``, and the gradient scaler of float16.

    Raises:
        ConfigError: the device does not support the precision.
    """
    dtype = _DTYPES.get(config.mixed_precision or "")
    if dtype is None:
        return None, None
    if dtype is torch.bfloat16 and device.type == "cuda" and not torch.cuda.is_bf16_supported():
        raise ConfigError(
            "TrainingConfig.mixed_precision: got 'bf16', which this GPU does not support; use 'fp16' or None."
        )
    return autocast_and_scaler(device, dtype)


def build_criterion(config: "TrainingConfig", device: torch.device) -> nn.Module | None:
    """``config.loss`` on the device; None if it is not set.

    Raises:
        ConfigError: the loss does not accept its arguments.
    """
    from trainwright.config.torch_names import find_torch_class, split_name

    if config.loss is None or config.loss == CUSTOM:
        return None
    found, _ = find_torch_class("loss", config.loss)
    assert found is not None, "checked when the config was made"
    _, named = split_name(config.loss)
    arguments = {name: torch.tensor(v, dtype=torch.float32) if isinstance(v, list) else v for name, v in named.items()}
    try:
        criterion: nn.Module = found(**arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"TrainingConfig.loss: {found.__name__} does not accept {named}: {error}.") from error
    return criterion.to(device)


@without_compiler()
def build_optimizer(config: "TrainingConfig", model: nn.Module) -> Optimizer:
    """``config.optimizer`` over the parameters of ``model``.

    Includes frozen parameters: they have no gradient and do not change, and a resumed run may freeze others.

    Raises:
        ConfigError: no parameter is trainable, or the optimizer does not accept its arguments.
    """
    from trainwright.config.torch_names import find_torch_class, split_name

    found, _ = find_torch_class("optimizer", config.optimizer)
    assert found is not None, "checked when the config was made"
    _, arguments = split_name(config.optimizer)
    if not any(gather_over_pipeline(any(parameter.requires_grad for parameter in model.parameters()))):
        raise ConfigError(
            f"Trainer.model: {type(model).__name__} has no trainable parameter; set requires_grad=True on some."
        )
    settings = {"lr": config.learning_rate, **arguments}
    if "weight_decay" in inspect.signature(found).parameters or config.weight_decay:
        settings.setdefault("weight_decay", config.weight_decay)
    parameters: list[Any] = list(model.parameters())
    if config.layer_decay is not None or not config.decay_norm_and_bias:
        parameters = _parameter_groups(config, model, settings)
    settings |= fused_arguments(found, settings, parameters, model)
    try:
        optimizer: Optimizer = found(parameters, **settings)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"TrainingConfig.optimizer: {found.__name__} does not accept {settings}: {error}.") from error
    return optimizer


def _parameter_groups(config: "TrainingConfig", model: nn.Module, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Groups by layer, and without weight decay of norm layers and biases, as configured."""
    off = None if config.decay_norm_and_bias else 0.0
    if off is not None and not settings.get("weight_decay"):
        logger.warning("TrainingConfig.decay_norm_and_bias=False has no effect without weight_decay.")
    from trainwright.optim.build import get_default_optimizer_params  # here: loads omegaconf

    return get_default_optimizer_params(
        model,
        base_lr=settings["lr"],
        weight_decay_norm=off,
        weight_decay_bias=off,
        layer_decay=config.layer_decay,
        include_frozen=True,
    )


def losses(
    criterion: Callable[..., Tensor] | None, own_loss: Callable[..., Tensor] | None, autocast: Autocast | None
) -> tuple[Callable[..., Tensor] | None, Callable[..., Tensor] | None]:
    """The criterion, and the model's own ``compute_loss`` if it has one, in the run's precision."""
    if get_tensor_parallel_size() > 1:
        from trainwright.parallel.tensor import with_local_loss

        criterion, own_loss = criterion and with_local_loss(criterion), own_loss and with_local_loss(own_loss)
    if autocast is None:
        return criterion, own_loss
    return criterion and autocast()(criterion), own_loss and autocast()(own_loss)
