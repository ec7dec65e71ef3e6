"""Pictures and histograms put during a run, kept on their device until a writer asks.

C channels, H height, W width, N values, K bins.
"""

from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trainwright.config.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    ArrayLike = Tensor | npt.NDArray[np.generic]


@dataclass(frozen=True, slots=True)
class Image:
    """One picture. ``number`` counts the figures of a storage, so that a writer knows which are new to it."""

    number: int
    name: str
    iteration: int
    pixels: Tensor  # (C, H, W)

    @property
    def num_bytes(self) -> int:
        return self.pixels.nbytes


@dataclass(frozen=True, slots=True)
class Histogram:
    """One histogram: ``low, high, count, sum, sum of squares`` and then the counts of K equal bins, float64."""

    number: int
    name: str
    iteration: int
    summary: Tensor

    @property
    def num_bytes(self) -> int:
        return self.summary.nbytes


class Figures:
    """The newest pictures and histograms, of at most ``max_bytes`` together; older ones make room for them."""

    def __init__(self, max_bytes: int = 64 * 2**20) -> None:
        self._max_bytes = max_bytes
        self._kept: deque[Image | Histogram] = deque()
        self._num_bytes = 0
        self._count = 0  # of all figures ever

    def add_image(self, name: str, iteration: int, image: "ArrayLike") -> None:
        """Keep a copy of a picture."""
        self._count += 1
        self._add(Image(self._count, name, iteration, image_copy(name, image)))

    def add_histogram(self, name: str, iteration: int, values: "ArrayLike", bins: int) -> None:
        """Keep the histogram of the values."""
        self._count += 1
        self._add(Histogram(self._count, name, iteration, histogram_summary(name, values, bins)))

    def after(self, number: int) -> list[Image | Histogram]:
        """The figures kept that came after the one with this number, oldest first."""
        return [figure for figure in tuple(self._kept) if figure.number > number]  # others may be added meanwhile

    def until_now(self) -> "FiguresUntil":
        """Those put up to now, brought to the host: for another thread, which may not disturb the device."""
        self._kept = deque(map(_on_host, self._kept))
        return FiguresUntil(self, self._count)

    def _add(self, figure: Image | Histogram) -> None:
        self._kept.append(figure)
        self._num_bytes += figure.num_bytes
        while self._num_bytes > self._max_bytes and len(self._kept) > 1:
            self._num_bytes -= self._kept.popleft().num_bytes


@dataclass(frozen=True, slots=True)
class FiguresUntil:
    """The figures up to one of them. Does not hold them: those that have made room for newer ones are gone here too."""

    figures: Figures
    last: int

    def after(self, number: int) -> list[Image | Histogram]:
        """As ``Figures.after``."""
        return [figure for figure in self.figures.after(number) if figure.number <= self.last]


def _on_host(figure: Image | Histogram) -> Image | Histogram:
    if isinstance(figure, Image):
        return figure if figure.pixels.is_cpu else replace(figure, pixels=figure.pixels.cpu())
    return figure if figure.summary.is_cpu else replace(figure, summary=figure.summary.cpu())


def image_copy(name: str, image: "ArrayLike") -> Tensor:
    """A detached copy of shape (C, H, W); a picture of shape (H, W) gets a channel."""
    pixels = torch.as_tensor(image).detach().clone()
    if pixels.dim() == 2:
        pixels = pixels.unsqueeze(0)
    if pixels.dim() != 3 or pixels.shape[0] not in (1, 3, 4):
        raise ConfigError(
            f"put_image({name!r}): got shape {tuple(pixels.shape)}; it must be (H, W), or (C, H, W) with 1, 3 or 4 "
            "channels. From (H, W, C) it is image.permute(2, 0, 1); of a batch put one picture, images[0]."
        )
    return pixels


def histogram_summary(name: str, values: "ArrayLike", bins: int) -> Tensor:
    """Count the finite values in ``bins`` equal bins from the smallest to the largest, without waiting for the device.

    ``torch.histc`` and ``torch.bincount`` read numbers on the host, which stops the queue of a GPU; this does not.
    """
    values_N = torch.as_tensor(values).detach().reshape(-1)
    if bins < 1 or values_N.numel() == 0 or values_N.is_complex():
        raise ConfigError(
            f"put_histogram({name!r}): got {values_N.numel()} values of {values_N.dtype} and bins={bins}; "
            "it takes at least one real value and at least one bin."
        )
    wide = wide_dtype(values_N.device)
    values_N = values_N.to(wide)
    is_finite_N = values_N.isfinite()
    infinity = torch.inf
    low = values_N.where(is_finite_N, infinity).amin()
    high = values_N.where(is_finite_N, -infinity).amax()
    is_flat = low == high  # bins of no width: a bin of width 1 around the value, as in numpy
    low, high = torch.where(is_flat, low - 0.5, low), torch.where(is_flat, high + 0.5, high)
    kept_N = values_N.where(is_finite_N, 0.0)
    position_N = ((values_N - low) / (high - low) * bins).nan_to_num(0.0).clamp(0, bins - 1)
    counts_K = torch.zeros(bins, dtype=wide, device=values_N.device)
    counts_K.scatter_add_(0, position_N.long(), is_finite_N.to(wide))
    head = torch.stack([low, high, is_finite_N.sum().to(wide), kept_N.sum(), kept_N.square().sum()])
    return torch.cat([head, counts_K])


def wide_dtype(device: torch.device) -> torch.dtype:
    """The widest float that the device knows: holds every float, and integers up to 2**53."""
    return torch.float32 if device.type == "mps" else torch.float64
