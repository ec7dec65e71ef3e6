"""Transforms from images to tensors. The transforms of torchvision accept the same images.

C channels, H height, W width.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from trainwright.base.errors import ConfigError, ConfigTypeError


class Compose:
    """Apply transforms in order."""

    def __init__(self, transforms: Sequence[Callable[[Any], Any]]) -> None:
        self.transforms = list(transforms)

    def __call__(self, image: Any) -> Any:
        for transform in self.transforms:
            image = transform(image)
        return image

    def __repr__(self) -> str:
        return f"Compose({self.transforms!r})"


class ToTensor:
    """Convert an image (H, W) or (H, W, C), array or PIL image, to a tensor (C, H, W).

    uint8 becomes float32 in [0, 1]; any other type keeps its type and values.

    >>> ToTensor()(np.full((2, 3), 255, dtype=np.uint8)).shape
    torch.Size([1, 2, 3])
    """

    def __call__(self, image: Any) -> torch.Tensor:
        if isinstance(image, torch.Tensor) or not hasattr(image, "__array_interface__"):
            raise ConfigTypeError(
                f"ToTensor: got {type(image).__name__}; it must be a numpy array (H, W) or (H, W, C), or a PIL image."
            )
        array = image if isinstance(image, np.ndarray) else np.array(image)
        if array.ndim not in (2, 3):
            raise ConfigError(f"ToTensor: got an array of shape {array.shape}; it must be (H, W) or (H, W, C).")
        pixels_HWC = torch.from_numpy(array)
        pixels_CHW = pixels_HWC[None] if array.ndim == 2 else pixels_HWC.permute(2, 0, 1)
        if pixels_CHW.dtype == torch.uint8:
            return pixels_CHW.to(torch.float32, memory_format=torch.contiguous_format).div_(255)
        return pixels_CHW.clone(memory_format=torch.contiguous_format)  # not a view of the caller's memory

    def __repr__(self) -> str:
        return "ToTensor()"


class Normalize:
    """``(image - mean) / std`` for each channel of a floating-point tensor (..., C, H, W). A new tensor.

    >>> Normalize(mean=[0.5], std=[0.5])(torch.ones(1, 2, 2)).unique()
    tensor([1.])
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        if any(value == 0 for value in std):
            raise ConfigError(f"Normalize.std: got {list(std)}; no value may be 0.")
        self.mean = list(mean)
        self.std = list(std)
        self._mean_C11 = torch.tensor(self.mean, dtype=torch.float32, device="cpu")[:, None, None]
        self._std_C11 = torch.tensor(self.std, dtype=torch.float32, device="cpu")[:, None, None]

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        if not isinstance(image, torch.Tensor) or not image.is_floating_point():
            kind = image.dtype if isinstance(image, torch.Tensor) else type(image).__name__
            raise ConfigTypeError(
                f"Normalize: got {kind}; it must be a floating-point tensor. Put ToTensor() before it."
            )
        return (image - self._mean_C11.to(image)) / self._std_C11.to(image)

    def __repr__(self) -> str:
        return f"Normalize(mean={self.mean}, std={self.std})"
