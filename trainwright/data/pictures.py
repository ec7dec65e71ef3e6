"""Pictures from files, arrays and tensors, as Pillow's images in grey or RGB."""

import os
from typing import Any

import numpy as np
import torch

from trainwright.config.errors import UserError
from trainwright.data.errors import DataError

_CHANNELS = (1, 3, 4)


def to_picture(source: Any, *, gray_scale: bool = False) -> Any:
    """Pillow's image of a path, an image, an array (H, W) or (H, W, C) or a tensor (H, W) or (C, H, W).

    Whole numbers are 0 to 255, floating-point ones 0 to 1. The result is RGB, or grey ("L"). A photo is turned as
    its camera says; what is transparent becomes white. The file is read whole and closed.

    Raises:
        DataError: it cannot be read as a picture; names the file and says why.
    """
    image_module = pillow()
    if isinstance(source, str | os.PathLike):
        return _plain(_opened(os.fspath(source), image_module), gray_scale)
    if isinstance(source, image_module.Image):
        return _plain(source, gray_scale)
    if isinstance(source, torch.Tensor):
        array = source.detach().cpu().numpy()
        source = array.transpose(1, 2, 0) if array.ndim == 3 else array
    if isinstance(source, np.ndarray):
        return _plain(image_module.fromarray(_as_bytes(source)), gray_scale)
    raise DataError(
        f"picture: got {type(source).__name__}; a path, a Pillow image, a numpy array (H, W, C) or a tensor "
        "(C, H, W) is allowed."
    )


def pillow() -> Any:
    """The module PIL.Image."""
    try:
        import PIL.Image
    except ImportError as error:
        raise UserError(
            "Pictures are read by Pillow, which is not there: pip install 'trainwright[images]'."
        ) from error
    return PIL.Image


def _opened(path: str, image_module: Any) -> Any:
    try:
        with image_module.open(path) as image:
            image.load()
            return image
    except FileNotFoundError as error:
        raise DataError(f"{path}: there is no such picture.") from error
    except (OSError, SyntaxError, ValueError, image_module.DecompressionBombError) as error:  # Pillow's, by format
        raise DataError(
            f"{path}: cannot be read as a picture ({type(error).__name__}: {error}). "
            "Replace the file, or take its row out."
        ) from error


def _plain(image: Any, gray_scale: bool) -> Any:
    import PIL.Image
    import PIL.ImageOps

    image = PIL.ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16") or image.mode == "I":  # 16 bit: Pillow's own conversion cuts them off at 255
        image = PIL.Image.fromarray((np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8))
    if image.mode == "P" or "A" in image.mode:
        image = image.convert("RGBA")
        white = PIL.Image.new("RGBA", image.size, "white")
        image = PIL.Image.alpha_composite(white, image)
    return image.convert("L" if gray_scale else "RGB")


def _as_bytes(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """(H, W) or (H, W, C) as uint8."""
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in _CHANNELS):
        raise DataError(
            f"picture: got an array of shape {array.shape}; (height, width) or (height, width, channels) is allowed, "
            "with 1, 3 or 4 channels, and for a tensor (channels, height, width)."
        )
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if array.dtype == np.bool_:
        return array.astype(np.uint8) * 255
    largest = 1.0 if array.dtype.kind == "f" else 255
    if array.size and not (array.min() >= 0 and array.max() <= largest):
        raise DataError(
            f"picture: got {array.dtype} values from {array.min()} to {array.max()}; whole numbers lie in 0 to 255, "
            "floating-point ones in 0 to 1."
        )
    return np.rint(array * 255.0).astype(np.uint8) if array.dtype.kind == "f" else array.astype(np.uint8)
