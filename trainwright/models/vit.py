"""Vision transformers (Dosovitskiy et al. 2020), as timm makes them: ``vit.create_model()``."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainwright.base.errors import ConfigImportError, import_optional


def create_model(
    model_name: str = "vit_base_patch16_224",
    *,
    pretrained: bool = False,
    checkpoint_path: str | os.PathLike[str] | None = None,
    device: torch.device | str | None = None,
    **kwargs: Any,
) -> nn.Module:
    """timm's model of that name; ``kwargs`` are timm's, such as ``num_classes=10`` or ``img_size=64``.

    Args:
        pretrained: fetch its published weights.
        checkpoint_path: a file of weights, ``.safetensors`` or a plain ``.pt``; all must fit.

    Raises:
        ConfigImportError: timm is not installed. CheckpointError: the weights do not fit.
    """
    message = "vit.create_model needs the package timm: pip install timm."
    timm = import_optional("timm", message, ConfigImportError)
    model: nn.Module = timm.create_model(model_name, pretrained=pretrained, **kwargs)
    if checkpoint_path is not None:
        from trainwright.checkpoint.weights import load_weights, read_weights

        path = Path(checkpoint_path)
        load_weights(model, read_weights(path), str(path), strict=True)
    return model if device is None else model.to(device)
