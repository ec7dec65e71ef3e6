"""The header of a safetensors file, read and checked without torch and numpy: commands list checkpoints quickly.

The file: eight bytes of header length, a JSON header, then every tensor's bytes without gaps. The safetensors library
makes the same checks when it reads tensors, except that it silently uses the last of two tensors of one name, and
knows dtypes that no checkpoint has.
"""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainwright.base.files import open_regular
from trainwright.checkpoint.errors import CheckpointError

_MAX_BYTES = 100_000_000  # of a header, as in the safetensors library
_METADATA = "__metadata__"
TIED = "tied"  # metadata key: JSON of {name that is not in the file: name that holds the same tensor}
COPIES = (
    "copies"  # metadata key: JSON of {name of a copy on a later pipeline stage: name of the tensor that it repeats}
)
_BITS = {  # of what is saved and loaded
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("BOOL", "I8", "U8", "F8_E4M3", "F8_E5M2"), 8),
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """The header's entry for one tensor. ``dtype`` is the name in the format, such as ``BF16``."""

    shape: tuple[int, ...]
    dtype: str
    begin: int  # bytes after the header
    end: int

    @property
    def num_values(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Header:
    tensors: dict[str, TensorEntry]
    metadata: dict[str, str]


def read_header(path: Path) -> Header:
    """The header of a safetensors file."""
    try:
        content, data_bytes = _read_json(path)
        metadata = content.pop(_METADATA, {})
        if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
            raise ValueError(f"{_METADATA} is no mapping of texts")
        tensors = {name: _entry(name, fields) for name, fields in content.items()}
        _check_places(tensors, data_bytes)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise CheckpointError(f"{path}: not a safetensors file ({error}).") from error
    return Header(tensors, metadata)


def names_in(metadata: Mapping[str, str], key: str) -> dict[str, str]:
    """The names in a file's metadata under ``key``, which is TIED or COPIES."""
    try:
        names = json.loads(metadata.get(key, "{}"))
    except (ValueError, RecursionError):
        return {}
    pairs = names.items() if isinstance(names, dict) else ()
    return {name: other for name, other in pairs if isinstance(other, str)}


def _read_json(path: Path) -> tuple[dict[str, Any], int]:
    """The header as plain values, and how many bytes follow it."""
    with open(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_BYTES):
            raise ValueError(f"a header of {length:,} bytes in a file of {size:,}")
        content = json.loads(file.read(length).decode(), object_pairs_hook=_without_repeats)
    if not isinstance(content, dict):
        raise ValueError(f"its header is a {type(content).__name__}, no mapping")
    return content, size - 8 - length


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name!r} is there twice")
        found[name] = value
    return found


def _entry(name: str, fields: Any) -> TensorEntry:
    try:
        shape, dtype, (begin, end) = fields["shape"], fields["dtype"], fields["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{name!r} has no shape, dtype and two data_offsets") from error
    numbers = [*shape, begin, end] if isinstance(shape, list) else [None]
    if not isinstance(dtype, str) or not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"{name!r} has shape {shape!r}, dtype {dtype!r} and data_offsets {[begin, end]!r}")
    if dtype not in _BITS:
        raise ValueError(f"{name!r} has the dtype {dtype!r}, expected one of {', '.join(sorted(_BITS))}")
    entry = TensorEntry(tuple(shape), dtype, begin, end)
    if entry.num_values * _BITS[dtype] != (end - begin) * 8:
        raise ValueError(f"{name!r} has {end - begin:,} bytes, which is not shape {shape!r} of {dtype}")
    return entry


def _check_places(tensors: dict[str, TensorEntry], data_bytes: int) -> None:
    """Check that each tensor begins at the end of the previous one, and that the last one ends with the file."""
    reached = 0
    for name, entry in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != reached or entry.end < entry.begin:
            raise ValueError(f"{name!r} lies at {entry.begin:,} to {entry.end:,}, expected to begin at {reached:,}")
        reached = entry.end
    if reached != data_bytes:
        raise ValueError(f"its tensors have {reached:,} bytes, the file has {data_bytes:,} for them")
