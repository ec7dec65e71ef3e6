"""The header of a safetensors file, read without torch: commands list checkpoints quickly.

The safetensors library checks it, but would use the last of two tensors of one name.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from trainwright.checkpoint.errors import CheckpointError
from trainwright.checkpoint.files import open_regular

_METADATA = "__metadata__"
TIED = "tied"  # metadata key: JSON of {name that is not in the file: name that holds the same tensor}
COPIES = (
    "copies"  # metadata key: JSON of {name of a copy on a later pipeline stage: name of the tensor that it repeats}
)


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """The header's entry for one tensor. ``dtype`` is the name in the format, such as ``BF16``."""

    shape: tuple[int, ...]
    dtype: str
    begin: int  # bytes after the header

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
        with open(open_regular(path), "rb") as file:
            safe_open(str(path), "np")
            content = json.loads(file.read(int.from_bytes(file.read(8), "little")), object_pairs_hook=_without_repeats)
    except (SafetensorError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not a safetensors file ({error}).") from error
    metadata = content.pop(_METADATA, None) or {}
    tensors = {n: TensorEntry((*one["shape"],), one["dtype"], one["data_offsets"][0]) for n, one in content.items()}
    return Header(tensors, metadata)


def open_tensors(path: Path) -> Any:  # a safe_open, which has no annotations
    """The file, to read single tensors by ``get_tensor(name)``."""
    try:
        return safe_open(str(path), "pt")
    except SafetensorError as error:
        raise CheckpointError(f"{path}: not a safetensors file ({error}).") from error


def names_in(metadata: Mapping[str, str], key: str) -> dict[str, str]:
    """The names in a file's metadata under ``key``, which is TIED or COPIES."""
    try:
        names = json.loads(metadata.get(key, "{}"))
    except (ValueError, RecursionError):
        return {}
    pairs = names.items() if isinstance(names, dict) else ()
    return {name: other for name, other in pairs if isinstance(other, str)}


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name!r} is there twice")
        found[name] = value
    return found
