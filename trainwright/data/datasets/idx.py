"""IDX files: the format of MNIST, one array of bytes behind a short header.

The header is two zero bytes, the element type (8: uint8), the number of dimensions, then each dimension as a
big-endian 32-bit number. Files may be gzipped; the content says so, not the name.
"""

import gzip
import math
import os
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trainwright.checkpoint.files import atomic_write
from trainwright.data.errors import DataError

_GZIP = b"\x1f\x8b"
_UINT8 = 8


def read_idx(path: str | os.PathLike[str], *, num_dimensions: int | None = None) -> npt.NDArray[np.uint8]:
    """The array of an IDX file of uint8, gzipped or not. Writable.

    Raises:
        DataError: the file is no IDX file of uint8, is cut off or too long, or has another number of dimensions than
        asked for.
    """
    return parse_idx(Path(path).read_bytes(), str(path), num_dimensions=num_dimensions)


def parse_idx(content: bytes, name: str, *, num_dimensions: int | None = None) -> npt.NDArray[np.uint8]:
    """As `read_idx`, of what is in memory already; ``name`` is for messages."""
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

    The file is complete or not there. Equal arrays give equal bytes.
    """
    if array.dtype != np.uint8:
        raise DataError(
            f"{path}: got an array of {array.dtype}; IDX files are written from uint8 only. Convert it: "
            "array.astype(np.uint8)."
        )
    header = bytes([0, 0, _UINT8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
    content = header + np.ascontiguousarray(array).tobytes()
    atomic_write(path, gzip.compress(content, mtime=0) if str(path).endswith(".gz") else content)
