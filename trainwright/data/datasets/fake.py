"""FakeData: pictures of noise, for trying a pipeline without data."""

from collections.abc import Callable
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from trainwright.config.errors import ConfigError
from trainwright.data.seeding import SAMPLE_STREAM, mixed_seed


class FakeData(Dataset[tuple[Any, Any]]):
    """Pairs of noise, uint8 of shape (H, W, C) or (H, W) for one channel, and a class in ``[0, num_classes)``.

    A sample is a function of ``index + random_offset`` alone, the same on every machine and in every worker; the
    global generators are left alone. ``image_size`` is (C, H, W), as after ``ToTensor``.
    """

    def __init__(
        self,
        size: int = 1000,
        image_size: tuple[int, int, int] = (3, 224, 224),
        num_classes: int = 10,
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[int], Any] | None = None,
        random_offset: int = 0,
    ) -> None:
        for name, value in (("size", size), ("num_classes", num_classes)):
            if value < 1:
                raise ConfigError(f"FakeData.{name}: got {value!r}; it must be a whole number >= 1.")
        if len(image_size) != 3 or min(image_size) < 1:
            raise ConfigError(
                f"FakeData.image_size: got {tuple(image_size)}; it must be (channels, height, width), each >= 1."
            )
        self.size = size
        self.image_size = tuple(image_size)
        self.num_classes = num_classes
        self.transform = transform
        self.target_transform = target_transform
        self.random_offset = random_offset

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        if not 0 <= index < self.size:
            raise IndexError(f"FakeData: sample {index} of {self.size}")
        generator = np.random.default_rng(mixed_seed(self.random_offset + index, SAMPLE_STREAM))
        channels, height, width = self.image_size
        image: Any = generator.integers(0, 256, (height, width, channels), dtype=np.uint8)
        if channels == 1:
            image = image[:, :, 0]
        target: Any = int(generator.integers(self.num_classes))
        if self.transform is not None:
            image = self.transform(image)
        if self.target_transform is not None:
            target = self.target_transform(target)
        return image, target

    def __repr__(self) -> str:
        return (
            f"FakeData(size={self.size}, image_size={self.image_size}, num_classes={self.num_classes}, "
            f"random_offset={self.random_offset})"
        )
