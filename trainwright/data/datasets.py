"""Data sets of pictures: MNIST (handwritten digits, from the four IDX files that it is published as) and FakeData."""

import gzip
import hashlib
import math
import os
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from trainwright.base.errors import ConfigError, MissingFileError
from trainwright.base.files import atomic_write
from trainwright.data.errors import DataError
from trainwright.data.seeding import SAMPLE_STREAM, mixed_seed

_GZIP = b"\x1f\x8b"
_UINT8 = 8


def read_idx(path: str | os.PathLike[str], *, num_dimensions: int | None = None) -> npt.NDArray[np.uint8]:
    """The array of an IDX file of uint8, gzipped or not. Writable.

    Raises:
        DataError: not an IDX file of uint8, truncated or too long, or another number of dimensions.
    """
    return _parsed(Path(path).read_bytes(), str(path), num_dimensions)


def _parsed(content: bytes, name: str, num_dimensions: int | None) -> npt.NDArray[np.uint8]:
    if content.startswith(_GZIP):
        try:
            content = gzip.decompress(content)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DataError(
                f"{name}: the gzip data are broken ({error}). An interrupted copy? Delete the file and get it again."
            ) from error
    if len(content) < 4 or content[:2] != b"\0\0":
        raise DataError(
            f"{name}: no IDX file: it begins with {content[:4]!r}, not with two zero bytes. Is it a web page saved "
            "under that name?"
        )
    element_type, dimensions = content[2], content[3]
    if element_type != _UINT8:
        raise DataError(f"{name}: element type {element_type:#04x}; only uint8 (0x08) is read here.")
    if num_dimensions is not None and dimensions != num_dimensions:
        raise DataError(
            f"{name}: {dimensions} dimensions; {num_dimensions} are expected. Are images and labels exchanged?"
        )
    header_bytes = 4 + 4 * dimensions
    if len(content) < header_bytes:
        raise DataError(
            f"{name}: cut off within its header, at {len(content)} of {header_bytes} bytes. Get the file again."
        )
    shape = tuple(int(size) for size in np.frombuffer(content, ">u4", dimensions, offset=4))
    expected = header_bytes + math.prod(shape)
    if len(content) != expected:
        raise DataError(
            f"{name}: {len(content):,} bytes; shape {shape} in its header needs {expected:,}. An interrupted copy? "
            "Get the file again."
        )
    return np.frombuffer(bytearray(content), np.uint8, offset=header_bytes).reshape(shape)


def write_idx(path: str | os.PathLike[str], array: npt.NDArray[np.uint8]) -> None:
    """Write a uint8 array, gzipped where the name ends in ``.gz``.

    The file is written atomically. Equal arrays give equal bytes.
    """
    if array.dtype != np.uint8:
        raise DataError(
            f"{path}: got an array of {array.dtype}; IDX files are written from uint8 only. Convert it: "
            "array.astype(np.uint8)."
        )
    header = bytes([0, 0, _UINT8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
    content = header + np.ascontiguousarray(array).tobytes()
    atomic_write(path, gzip.compress(content, mtime=0) if str(path).endswith(".gz") else content)


MIRRORS = ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/")

TIMEOUT_S = 30

# Of the published gzipped files, against damaged mirrors.
_MD5 = {
    "train-images-idx3-ubyte": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte": "ec29112dd5afa0611ce80d1b7f02629c",
}


class _Images(Dataset[tuple[Any, Any]]):
    """Pairs of an image and its class, after their transforms."""

    transform: Callable[[Any], Any] | None
    target_transform: Callable[[int], Any] | None

    def _transformed(self, image: Any, target: Any) -> tuple[Any, Any]:
        image = image if self.transform is None else self.transform(image)
        return image, target if self.target_transform is None else self.target_transform(target)


class MNIST(_Images):
    """Pairs of an image, uint8 of shape (H, W), and its digit, an int, after their transforms.

    The files are searched in ``root/MNIST/raw``, then in ``root``, plain or gzipped. ``download`` downloads missing
    ones into ``root/MNIST/raw``: from ``source_url`` if given (https, or file for a local copy), otherwise from public
    mirrors. An image is a copy: transforms do not change the data set. ``data`` and ``targets`` are the arrays of all
    images and digits.

    Raises:
        MissingFileError: files are missing, and ``download`` is off or failed; lists files and sources.
        DataError: a file is damaged, or the numbers of images and labels differ.
    """

    def __init__(
        self,
        root: str | Path,
        train: bool = True,
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[int], Any] | None = None,
        download: bool = False,
        source_url: str | None = None,
    ) -> None:
        self.root = Path(root)
        self.train = train
        self.transform = transform
        self.target_transform = target_transform
        part = "train" if train else "t10k"
        names = (f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte")
        paths = _find_files(self.root, names, download=download, source_url=source_url)
        self.data: npt.NDArray[np.uint8] = read_idx(paths[0], num_dimensions=3)
        self.targets: npt.NDArray[np.uint8] = read_idx(paths[1], num_dimensions=1)
        if len(self.data) != len(self.targets):
            raise DataError(
                f"MNIST: {paths[0]} has {len(self.data):,} pictures, {paths[1].name} has {len(self.targets):,} labels. "
                "The files do not belong together: delete both and get them again."
            )

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self._transformed(self.data[index].copy(), int(self.targets[index]))

    def __repr__(self) -> str:
        return f"MNIST(root={str(self.root)!r}, train={self.train})"


def _find_files(root: Path, names: tuple[str, ...], *, download: bool, source_url: str | None) -> list[Path]:
    if source_url is not None and not source_url.startswith(("https://", "file://")):
        raise ConfigError(
            f"MNIST.source_url: got {source_url!r}; it must begin with https:// (or file:// for a copy on your own"
            " disk)."
        )
    sources = MIRRORS if source_url is None else (f"{source_url.removesuffix('/')}/",)
    found = {name: _find_file(root, name) for name in names}
    failures: list[str] = []
    for name in names:
        if found[name] is None and download and not failures:
            found[name] = _download(root / "MNIST" / "raw", f"{name}.gz", sources, failures)
    absent = [name for name in names if found[name] is None]
    if absent:
        tried = "\n  ".join(failures) if download else "download=True would fetch them."
        raise MissingFileError(
            f"MNIST: {' and '.join(absent)} (plain or .gz) not found in {root / 'MNIST' / 'raw'} or {root}.\n  "
            f"{tried}\n"
            "  Put the files there, or make a small set of real digits without a network: "
            f"python examples/mnist/prepare_digits.py {root}"
        )
    return [path for path in found.values() if path is not None]


def _find_file(root: Path, name: str) -> Path | None:
    for folder in (root / "MNIST" / "raw", root):
        for path in (folder / name, folder / f"{name}.gz"):
            if path.is_file():
                return path
    return None


def _download(folder: Path, file_name: str, sources: tuple[str, ...], failures: list[str]) -> Path | None:
    """The file from the first source with a valid copy; errors are added to ``failures``."""
    for source in sources:
        url = source + file_name
        try:
            with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
                content: bytes = response.read()
            _check_content(content, url, is_published=source in MIRRORS)
        except (urllib.error.URLError, TimeoutError, ConnectionError, DataError) as error:
            failures.append(f"Downloading failed: {url}: {getattr(error, 'reason', error)}")
            continue
        folder.mkdir(parents=True, exist_ok=True)
        atomic_write(folder / file_name, content)
        failures.clear()
        return folder / file_name
    return None


def _check_content(content: bytes, url: str, *, is_published: bool) -> None:
    name = url.rsplit("/", 1)[1].removesuffix(".gz")
    if is_published and hashlib.md5(content, usedforsecurity=False).hexdigest() != _MD5[name]:
        raise DataError("its checksum is not that of the published file")
    _parsed(content, url, 3 if "images" in name else 1)


class FakeData(_Images):
    """Pairs of a random image, uint8 of shape (H, W, C) or (H, W) for one channel, and a class in ``[0, num_classes)``.

    A sample is a function of ``index + random_offset``, the same on every machine and in every worker; the global
    generators are not used. ``image_size`` is (C, H, W), as after ``ToTensor``.
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
        return self._transformed(image, int(generator.integers(self.num_classes)))

    def __repr__(self) -> str:
        return (
            f"FakeData(size={self.size}, image_size={self.image_size}, num_classes={self.num_classes}, "
            f"random_offset={self.random_offset})"
        )
