"""ImageProcessor: converts images of any kind to one float tensor of one size, with Pillow.

B images, C channels (1 gray, 3 RGB), H height, W width.
"""

import functools
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from trainwright.base.errors import ConfigError, did_you_mean, import_optional
from trainwright.data.errors import DataError
from trainwright.tasks.preprocessor import Preprocessor, PreprocessorConfig, register_preprocessor

logger = logging.getLogger("trainwright.tasks")

# Names and numbers of Pillow.
_RESAMPLING = {"nearest": 0, "lanczos": 1, "bilinear": 2, "bicubic": 3, "box": 4, "hamming": 5}


@dataclass
class ImageProcessorConfig(PreprocessorConfig):
    """Settings of an `ImageProcessor`, in the order of their use: gray, mirror, resize, rescale, subtract ``mean``,
    divide by ``std``.

    Fields:
        mean, std: one number, or one per channel, for values after ``rescale``. None: not applied.
        rescale: factor on the values 0 to 255; 1.0 leaves them unchanged.
        resample: how to resize: "bilinear", "bicubic", "nearest", "lanczos", "box", "hamming", or Pillow's number.
        size: (width, height) in pixels; None keeps the size of each image.
        mirror: flip left and right, as for text that is read from the right.
        gray_scale: one channel instead of three.
    """

    name = "image_processor"
    filename = "image_processor_config.yaml"

    mean: float | Sequence[float] | None = None
    std: float | Sequence[float] | None = None
    rescale: float = 1 / 255
    resample: str | int | None = None
    size: tuple[int, int] | None = None
    mirror: bool = False
    gray_scale: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        names: dict[Any, str] = {None: "bilinear", **{number: name for name, number in _RESAMPLING.items()}}
        given = self.resample
        self.resample = str(given).lower() if isinstance(given, str | bool) else names.get(given, str(given))
        if self.resample not in _RESAMPLING:
            raise ConfigError(f"ImageProcessorConfig.resample: got {given!r}. {did_you_mean(str(given), _RESAMPLING)}")
        self.size = _size(self.size)
        for field in ("mean", "std"):
            setattr(self, field, _per_channel(field, getattr(self, field), 1 if self.gray_scale else 3))


@register_preprocessor("image_processor", config_class=ImageProcessorConfig)
class ImageProcessor(Preprocessor):
    """``ImageProcessor(config)(images, return_tensors="torch")`` gives ``{"pixel_values": (B, C, H, W) float32}``.

    >>> processor = ImageProcessor(ImageProcessorConfig(size=(128, 32), gray_scale=True))
    >>> processor([np.zeros((40, 60, 3), np.uint8)], return_tensors="torch")["pixel_values"].shape
    torch.Size([1, 1, 32, 128])
    """

    kind = "image_processor"

    def __call__(
        self, images: Any, *, return_tensors: Literal["torch", "pt", "np"] | None = None, **overrides: Any
    ) -> dict[str, Any]:
        """One image or several: paths, Pillow images, numpy arrays or tensors (see `to_pillow`).

        Args:
            return_tensors: "torch" (or "pt") stacks to a tensor, "np" to an array; None gives a list of
                arrays (C, H, W).
            overrides: fields of the config for this call.

        Raises:
            DataError: an image cannot be read, or images to be stacked have different sizes.
        """
        if overrides:
            return type(self)(self.config, **overrides)(images, return_tensors=return_tensors)
        if return_tensors not in (None, "torch", "pt", "np"):
            raise ConfigError(f"return_tensors: got {return_tensors!r}; 'torch', 'np' or None is allowed.")
        arrays = [self.to_array(image) for image in _as_list(images)]
        if return_tensors is None:
            return {"pixel_values": arrays}
        if len({array.shape for array in arrays}) > 1:
            sizes = sorted({f"{array.shape[2]}x{array.shape[1]}" for array in arrays})
            raise DataError(
                f"images: different sizes ({', '.join(sizes)}) cannot be stacked; set size=(width, height)."
            )
        stacked = np.stack(arrays)
        return {"pixel_values": stacked if return_tensors == "np" else torch.from_numpy(stacked)}

    def to_array(self, image: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
        """One image as float32 (C, H, W)."""
        config = self.config
        image = to_pillow(image, gray_scale=config.gray_scale)
        if config.mirror:
            image = image.transpose(pillow().Transpose.FLIP_LEFT_RIGHT)
        if config.size is not None and image.size != config.size:
            image = image.resize(config.size, _RESAMPLING[config.resample])
        array = np.asarray(image, dtype=np.float32)
        array_CHW = array[None] if array.ndim == 2 else np.ascontiguousarray(array.transpose(2, 0, 1))
        array_CHW *= np.float32(config.rescale)
        if config.mean is not None:
            array_CHW -= np.asarray(config.mean, dtype=np.float32).reshape(-1, 1, 1)
        if config.std is not None:
            array_CHW /= np.asarray(config.std, dtype=np.float32).reshape(-1, 1, 1)
        return array_CHW


def _as_list(images: Any) -> list[Any]:
    """The images as a list; a stack (B, C, H, W) is several images."""
    if isinstance(images, torch.Tensor | np.ndarray):
        return list(images) if images.ndim == 4 else [images]
    if isinstance(images, str | os.PathLike) or not isinstance(images, Sequence):
        return [images]
    if not images:
        raise DataError("images: got an empty list; at least one is needed.")
    return list(images)


def _size(value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    is_pair = isinstance(value, Sequence) and len(value) == 2 and all(type(side) is int and side > 0 for side in value)
    if not is_pair:
        raise ConfigError(
            f"ImageProcessorConfig.size: got {value!r}; it must be (width, height) in pixels, such as (128, 32)."
        )
    return value[0], value[1]


def _per_channel(field: str, value: Any, channels: int) -> list[float] | None:
    """``value`` as a list: one number per channel, or one for all."""
    if value is None:
        return None
    numbers = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    are_numbers = all(isinstance(n, int | float) and not isinstance(n, bool) for n in numbers)
    is_right = len(numbers) in (1, channels) and are_numbers
    if not is_right or (field == "std" and not all(n > 0 for n in numbers)):
        least = " > 0" if field == "std" else ""
        raise ConfigError(
            f"ImageProcessorConfig.{field}: got {value!r}; it must be a number{least}, or a list of {channels}, "
            f"one per channel ({'gray' if channels == 1 else 'RGB'})."
        )
    return [float(n) for n in numbers]


def to_pillow(image: Any, *, gray_scale: bool = False) -> Any:
    """A Pillow image from a path, an image, an array (H, W) or (H, W, C), or a tensor (H, W) or (C, H, W).

    Whole numbers are 0 to 255, floating-point numbers 0 to 1; in files they may also be 16 bit, or 0 to 255. The result
    is RGB, or gray ("L"). The orientation of a photo's EXIF data is applied; transparent parts become white.
    """
    image_module = pillow()
    if isinstance(image, str | os.PathLike):
        return _plain(_opened(os.fspath(image), image_module), gray_scale)
    if isinstance(image, image_module.Image):
        return _plain(image, gray_scale)
    if isinstance(image, torch.Tensor):
        array = image.detach().cpu().numpy()
        image = array.transpose(1, 2, 0) if array.ndim == 3 else array
    if isinstance(image, np.ndarray):
        return _plain(image_module.fromarray(_as_bytes(image)), gray_scale)
    raise DataError(
        f"image: got {type(image).__name__}; a path, a Pillow image, a numpy array (H, W, C) or a tensor "
        "(C, H, W) is allowed."
    )


def pillow() -> Any:
    message = "Images are read by Pillow, which is not installed: pip install pillow."
    return import_optional("PIL.Image", message)


def _opened(path: str, image_module: Any) -> Any:
    try:
        with image_module.open(path) as image:
            image.load()
            return image
    except FileNotFoundError as error:
        raise DataError(f"{path}: there is no such image.") from error
    except (OSError, SyntaxError, ValueError, image_module.DecompressionBombError) as error:  # of Pillow, by format
        raise DataError(
            f"{path}: cannot be read as an image ({type(error).__name__}: {error}). "
            "Replace the file, or remove its row."
        ) from error


def _plain(image: Any, gray_scale: bool) -> Any:
    import PIL.Image
    import PIL.ImageOps

    image = PIL.ImageOps.exif_transpose(image)
    if image.mode.startswith(("I", "F")):  # Pillow's conversion clips to 0 to 255
        array, transparent = np.asarray(image), image.info.get("transparency")
        if image.mode in ("I", "F"):
            _warn_of_range(image.mode)
        is_opaque = array != transparent
        if image.mode.startswith("I;16") or (image.mode == "I" and array.max() > 255):
            array = array.astype(np.int64) >> 8
        elif image.mode == "F" and array.max() > 1:
            array = array / 255
        image = PIL.Image.fromarray(_as_bytes(array))
        if transparent is not None:
            image.putalpha(PIL.Image.fromarray(_as_bytes(is_opaque)))
    if image.has_transparency_data:  # alpha, or a value that the file declares transparent
        image = image.convert("RGBA")
        white = PIL.Image.new("RGBA", image.size, "white")
        image = PIL.Image.alpha_composite(white, image)
    return image.convert("L" if gray_scale else "RGB")


@functools.cache  # once for a process
def _warn_of_range(mode: str) -> None:
    numbers, ranges = {"F": ("floats", "0 to 1, or to 255"), "I": ("32-bit integers", "0 to 255, or to 65,535")}[mode]
    logger.warning(
        "Images of %s do not say their range: the largest value of each decides whether it is %s. Save them with 8 or"
        " 16 bits to have one scale.", numbers, ranges,
    )  # fmt: skip


def _as_bytes(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """(H, W) or (H, W, C) as uint8."""
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (1, 3, 4)):
        raise DataError(
            f"image: got an array of shape {array.shape}; (height, width) or (height, width, channels) is allowed, "
            "with 1, 3 or 4 channels, and for a tensor (channels, height, width)."
        )
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if array.dtype == np.bool_:
        return array.astype(np.uint8) * 255
    largest = 1.0 if array.dtype.kind == "f" else 255
    if array.size and not (array.min() >= 0 and array.max() <= largest):
        raise DataError(
            f"image: got {array.dtype} values from {array.min()} to {array.max()}; whole numbers must be in 0 to 255, "
            "floating-point numbers in 0 to 1."
        )
    return np.rint(array * 255.0).astype(np.uint8) if array.dtype.kind == "f" else array.astype(np.uint8)
