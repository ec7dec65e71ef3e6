"""Images, histograms and texts recorded during a run, kept on their device until a writer reads them.

C channels, H height, W width, N values, K bins.
"""

from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from trainwright.base.devices import wide_dtype
from trainwright.base.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    ArrayLike = Tensor | npt.NDArray[np.generic]


@dataclass(frozen=True, slots=True)
class Medium:
    """An image, a histogram or a text. ``number`` counts those of a storage, so a writer knows which ones are new.

    The content of an image is (C, H, W); of a histogram ``low, high, count, sum, sum of squares`` and then the counts
    of K equal bins, float64.
    """

    number: int
    name: str
    iteration: int
    kind: Literal["image", "histogram", "text"]
    content: Tensor | str

    @property
    def num_bytes(self) -> int:
        return len(self.content) if isinstance(self.content, str) else self.content.nbytes

    def on_host(self) -> "Medium":
        """The same with its content in main memory."""
        if isinstance(self.content, str) or self.content.is_cpu:
            return self
        return replace(self, content=self.content.cpu())


class MediaBuffer:
    """The newest images, histograms and texts, at most ``max_bytes`` in total; the oldest are dropped first."""

    def __init__(self, max_bytes: int = 64 * 2**20) -> None:
        self._max_bytes = max_bytes
        self._kept: deque[Medium] = deque()
        self._num_bytes = 0
        self._count = 0  # of all items ever added

    def after(self, number: int) -> list[Medium]:
        """The kept items with a number above ``number``, oldest first."""
        return [item for item in tuple(self._kept) if item.number > number]  # another thread may add items meanwhile

    def until_now(self) -> "MediaView":
        """A view of the items added up to now, copied to the host: other threads must not touch the device."""
        self._kept = deque(item.on_host() for item in self._kept)
        return MediaView(self, self._count)

    def add(self, kind: Literal["image", "histogram", "text"], name: str, iteration: int, content: Any) -> None:
        self._count += 1
        item = Medium(self._count, name, iteration, kind, content)
        self._kept.append(item)
        self._num_bytes += item.num_bytes
        while self._num_bytes > self._max_bytes and len(self._kept) > 1:
            self._num_bytes -= self._kept.popleft().num_bytes


@dataclass(frozen=True, slots=True)
class MediaView:
    """The items up to number ``last``. It keeps no references: items that the buffer drops disappear here too."""

    buffer: MediaBuffer
    last: int

    def after(self, number: int) -> list[Medium]:
        """As ``MediaBuffer.after``."""
        return [item for item in self.buffer.after(number) if item.number <= self.last]


def image_copy(name: str, image: "ArrayLike") -> Tensor:
    """A detached copy of shape (C, H, W); an image of shape (H, W) gets a channel."""
    pixels = torch.as_tensor(image).detach().clone()
    if pixels.dim() == 2:
        pixels = pixels.unsqueeze(0)
    if pixels.dim() != 3 or pixels.shape[0] not in (1, 3, 4):
        raise ConfigError(
            f"put_image({name!r}): got shape {tuple(pixels.shape)}; it must be (H, W), or (C, H, W) with 1, 3 or 4 "
            "channels. Convert (H, W, C) with image.permute(2, 0, 1); of a batch, put one image: images[0]."
        )
    return pixels


def histogram_summary(name: str, values: "ArrayLike", bins: int) -> Tensor:
    """Count the finite values in ``bins`` equal bins from the smallest to the largest, without waiting for the device.

    ``torch.histc`` and ``torch.bincount`` synchronize with a GPU to read numbers on the host; this function does not.
    """
    values_N = torch.as_tensor(values).detach().reshape(-1)
    if bins < 1 or values_N.numel() == 0 or values_N.is_complex():
        raise ConfigError(
            f"put_histogram({name!r}): got {values_N.numel()} values of {values_N.dtype} and bins={bins}; "
            "it needs at least one real value and at least one bin."
        )
    wide = wide_dtype(values_N.device)
    values_N = values_N.to(wide)
    is_finite_N = values_N.isfinite()
    infinity = torch.inf
    low = values_N.where(is_finite_N, infinity).amin()
    high = values_N.where(is_finite_N, -infinity).amax()
    is_flat = low == high  # all values equal: a range of width 1 around the value, as in numpy
    low, high = torch.where(is_flat, low - 0.5, low), torch.where(is_flat, high + 0.5, high)
    kept_N = values_N.where(is_finite_N, 0.0)
    position_N = ((values_N - low) / (high - low) * bins).nan_to_num(0.0).clamp(0, bins - 1)
    counts_K = torch.zeros(bins, dtype=wide, device=values_N.device)
    counts_K.scatter_add_(0, position_N.long(), is_finite_N.to(wide))
    head = torch.stack([low, high, is_finite_N.sum().to(wide), kept_N.sum(), kept_N.square().sum()])
    return torch.cat([head, counts_K])
