"""ImageProcessor: what comes in, what is done to it, and what is refused; torchvision is the reference."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision.transforms.functional as F
from PIL import Image

from trainwright.base.errors import ConfigError
from trainwright.data import DataError, ImageProcessor, ImageProcessorConfig
from trainwright.tasks.image2text.image_processor import _warn_of_range


@pytest.fixture
def noise() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)


def pixels(image: Any, **fields: Any) -> torch.Tensor:
    return ImageProcessor(ImageProcessorConfig(**fields))(image, return_tensors="torch")["pixel_values"]


def test_as_torchvision_does_it(noise: np.ndarray) -> None:
    image = Image.fromarray(noise)
    got = pixels(image, size=(16, 8), mirror=True, mean=[0.1, 0.2, 0.3], std=[0.5, 0.6, 0.7], resample="bicubic")
    wanted = F.resize(F.hflip(image), [8, 16], F.InterpolationMode.BICUBIC)
    wanted = F.normalize(F.to_tensor(wanted), [0.1, 0.2, 0.3], [0.5, 0.6, 0.7])
    torch.testing.assert_close(got, wanted[None], rtol=1e-5, atol=1e-6)
    assert got.dtype == torch.float32
    # One grey channel.
    got = pixels(noise, size=(16, 8), gray_scale=True, mean=0.5, std=0.5)
    wanted = F.to_tensor(Image.fromarray(noise).convert("L").resize((16, 8), Image.Resampling.BILINEAR))
    torch.testing.assert_close(got, wanted[None] * 2 - 1, rtol=1e-5, atol=1e-6)


def test_all_kinds_of_pictures_are_one(noise: np.ndarray, tmp_path: Path) -> None:
    image = Image.fromarray(noise)
    image.save(tmp_path / "noise.png")
    tensor = torch.from_numpy(noise).permute(2, 0, 1)
    kinds = [tmp_path / "noise.png", str(tmp_path / "noise.png"), image, noise, tensor, tensor / 255, noise / 255.0]
    batch = pixels(kinds)
    assert batch.shape == (7, 3, 20, 30)
    torch.testing.assert_close(batch, F.to_tensor(image).expand(7, -1, -1, -1), rtol=1e-6, atol=0)
    assert (pixels(torch.stack([tensor, tensor])) == batch[:2]).all()


def test_values_and_lists(noise: np.ndarray) -> None:
    assert pixels(noise, rescale=1.0).amax() == noise.max()
    found = ImageProcessor()(noise)["pixel_values"]
    assert isinstance(found, list)
    assert found[0].shape == (3, 20, 30)
    stacked = ImageProcessor()([noise], return_tensors="np", size=(4, 5))["pixel_values"]
    assert isinstance(stacked, np.ndarray)
    assert stacked.shape == (1, 3, 5, 4)


def test_odd_pictures_become_plain_ones(tmp_path: Path) -> None:
    clear = Image.new("RGBA", (2, 2), (0, 0, 0, 0))
    assert (pixels(clear) == 1).all()
    assert (pixels(clear.convert("LA"), gray_scale=True) == 1).all()
    palette = Image.new("RGB", (2, 2), "red").convert("P")
    assert pixels(palette)[0, :, 0, 0].tolist() == [1, 0, 0]
    deep = Image.fromarray(np.full((2, 2), 0x8000, dtype=np.uint16))
    deep.save(tmp_path / "deep.png")
    assert pixels(tmp_path / "deep.png", gray_scale=True).flatten().tolist() == pytest.approx([0x80 / 255] * 4)
    assert (pixels(np.ones((2, 2), dtype=bool), gray_scale=True) == 1).all()


@pytest.mark.parametrize("mode", ["L", "RGB", "I;16"])
def test_a_value_that_a_png_declares_transparent_is_white(mode: str, tmp_path: Path) -> None:
    array = np.array([[0, 90], [180, 0]], dtype=np.uint8)
    values = {"L": array, "RGB": np.stack([array] * 3, axis=-1), "I;16": array.astype(np.uint16) * 257}[mode]
    Image.fromarray(values).save(tmp_path / "image.png", transparency=(0, 0, 0) if mode == "RGB" else 0)
    wanted = pytest.approx([1, 90 / 255, 180 / 255, 1])
    assert pixels(tmp_path / "image.png", gray_scale=True).flatten().tolist() == wanted
    Image.fromarray(array > 0).save(tmp_path / "image.png", transparency=0)
    assert (pixels(tmp_path / "image.png", gray_scale=True) == 1).all()


@pytest.mark.parametrize("array", [np.float32([0, 0.4, 1]), np.float32([0, 102, 255]), np.int32([0, 102, 255])])
def test_a_tiff_of_other_numbers_is_not_black(array: np.ndarray, tmp_path: Path) -> None:
    Image.fromarray(array[None]).save(tmp_path / "image.tiff")
    assert pixels(tmp_path / "image.tiff", gray_scale=True).flatten().tolist() == pytest.approx([0, 0.4, 1])
    Image.fromarray(array[None] - 1).save(tmp_path / "image.tiff")
    with pytest.raises(DataError, match="values from -"):
        pixels(tmp_path / "image.tiff")


def test_a_range_that_the_largest_value_decides_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _warn_of_range.cache_clear()  # once for a process
    for name in ("first", "second"):
        Image.fromarray(np.array([[0.0, 0.5]], dtype=np.float32)).save(tmp_path / f"{name}.tiff")
        pixels(tmp_path / f"{name}.tiff", gray_scale=True)
    assert [record.getMessage()[:16] for record in caplog.records] == ["Images of floats"]


def test_a_photo_is_turned_as_its_camera_says(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    Image.new("RGB", (30, 20)).save(tmp_path / "photo.jpg", exif=exif)
    assert pixels(tmp_path / "photo.jpg").shape == (1, 3, 30, 20)


def test_what_cannot_be_read_is_named(tmp_path: Path, noise: np.ndarray) -> None:
    (tmp_path / "text.png").write_text("no picture")
    with pytest.raises(DataError, match=r"text\.png: .*\n?.*Replace"):
        pixels(tmp_path / "text.png")
    Image.fromarray(noise).save(tmp_path / "whole.png")
    (tmp_path / "half.png").write_bytes((tmp_path / "whole.png").read_bytes()[:700])
    with pytest.raises(DataError, match=r"half\.png: cannot be read"):
        pixels(tmp_path / "half.png")
    with pytest.raises(DataError, match=r"absent\.png: there is no such image"):
        pixels(tmp_path / "absent.png")
    # Unequal sizes make no batch.
    with pytest.raises(DataError, match=r"different sizes \(30x10, 30x20\).*size=\(width, height\)"):
        pixels([noise, noise[:10]])
    # Return tensors is checked.
    with pytest.raises(ConfigError, match="return_tensors: got 'tf'"):
        ImageProcessor()(noise, return_tensors="tf")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("image", "match"),
    [
        (np.zeros((2, 3, 5)), r"shape \(2, 3, 5\)"),
        (np.full((2, 2), 7.0), r"values from 7\.0 to 7\.0"),
        (np.full((2, 2), -1), "from -1 to -1"),
        (np.full((2, 2), np.nan), "nan"),
        ([], "empty list"),
        (3, "got int"),
    ],
)
def test_what_is_no_picture_is_refused(image: Any, match: str) -> None:
    with pytest.raises(DataError, match=match):
        pixels(image)


@pytest.mark.parametrize("name", ["nearest", "bilinear", "bicubic", "lanczos", "box", "hamming"])
def test_resampling_by_name_and_by_pillows_number(name: str, noise: np.ndarray) -> None:
    method = Image.Resampling[name.upper()]
    for resample in (name, int(method)):
        wanted = F.to_tensor(Image.fromarray(noise).resize((7, 9), method))
        got = pixels(noise, size=(7, 9), resample=resample)
        torch.testing.assert_close(got, wanted[None], rtol=1e-6, atol=0)
