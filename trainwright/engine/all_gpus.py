"""All GPUs of this machine in one process: ``device_str="cuda"``, where there are several and no launcher."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainwright.engine.window import TOKENS


def has_all_gpus(device_str: str | None) -> bool:
    """Whether a run on this device is one on several GPUs."""
    launched = int(os.environ.get("WORLD_SIZE", 1)) > 1
    return device_str == "cuda" and not launched and torch.cuda.is_available() and torch.cuda.device_count() > 1


class AllGPUs(nn.DataParallel[Any]):
    """torch's DataParallel, for models that return their losses, too: the batch is split, and what comes back joined.

    A loss is the mean over the GPUs' parts of the batch, by their samples, or by their tokens if ``num_tokens`` tells.
    Slower than a process for each GPU (``torchrun --nproc-per-node``), since one Python drives all of them.
    """

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        scattered = super().scatter(inputs, kwargs, device_ids)
        self._sizes = [_samples((args, named)) for args, named in zip(*scattered, strict=True)]
        return scattered

    def gather(self, outputs: Sequence[Any], output_device: Any) -> Any:
        first = outputs[0]
        if isinstance(first, Mapping):
            weights = [out[TOKENS] for out in outputs] if TOKENS in first else self._sizes
            return {name: self._joined(name, [out[name] for out in outputs], output_device, weights) for name in first}
        return self._joined("", list(outputs), output_device, self._sizes)

    def _joined(self, name: str, values: list[Any], device: Any, weights: Sequence[Any]) -> Any:
        if not all(isinstance(value, Tensor) and value.dim() == 0 for value in values):
            return super().gather(values, device)
        place = torch.device("cuda", device) if isinstance(device, int) else device
        stacked = torch.stack([value.to(place) for value in values])
        if name == TOKENS:
            return stacked.sum()
        by = torch.stack([torch.as_tensor(weight, device=stacked.device) for weight in weights]).to(stacked.dtype)
        return torch.where(by > 0, stacked * by, torch.zeros_like(stacked)).sum() / by.sum().clamp(min=1)


def _samples(value: Any) -> int:
    """The first dimension of the first tensor in there; 1 where there is none."""
    if isinstance(value, Tensor):
        return len(value) if value.dim() else 1
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple | list) else ()
    return next((_samples(part) for part in parts if _has_tensor(part)), 1)


def _has_tensor(value: Any) -> bool:
    if isinstance(value, Tensor):
        return True
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple | list) else ()
    return any(map(_has_tensor, parts))
