"""Automatic mixed precision, applied to a model once, before training."""

import torch
from torch import nn


def autocast_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where the device computes in it (every CPU does), else float16."""
    if device.type == "cuda" and not torch.cuda.is_bf16_supported():
        return torch.float16
    return torch.bfloat16


def apply_autocast(model: nn.Module, device: torch.device) -> torch.amp.GradScaler | None:
    """Make every call of ``model`` run under autocast, in training and evaluation alike.

    Weights and optimizer state stay as they are (float32). Returns the gradient scaler that float16 needs, with
    ``torch.amp``'s defaults (first scale 65536, doubled every 2000 good steps); None for bfloat16, which needs none.
    """
    dtype = autocast_dtype(device)
    # The method of this one object is replaced, not a wrapper put around it: names in the state dict stay the same.
    model.forward = torch.autocast(device.type, dtype=dtype)(model.forward)
    return torch.amp.GradScaler(device.type) if dtype is torch.float16 else None
