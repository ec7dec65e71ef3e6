"""The header of a safetensors file, read without torch, and checked by the safetensors library."""

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from trainwright.checkpoint.errors import CheckpointError
from trainwright.checkpoint.files import open_regular

TIED = "tied"  # metadata key: JSON of {name that is not in the file: name that holds the same tensor}
COPIES = (
    "copies"  # metadata key: JSON of {name of a copy on a later pipeline stage: name of the tensor that it repeats}
)
RENAMED = "renamed"  # metadata key: JSON of {name in the file: name that the format cannot hold}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """The header's entry for one tensor. ``dtype`` is the name in the format, such as ``BF16``."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Header:
    tensors: dict[str, TensorEntry]
    metadata: dict[str, str]


def read_header(path: Path) -> Header:
    """The header of a safetensors file."""
    try:
        _check_names(path)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise CheckpointError(f"{path}: not a safetensors file ({error}).") from error
    with open_tensors(path, "np") as file:
        parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  # no mapping
        tensors = {name: TensorEntry(tuple(part.get_shape()), part.get_dtype()) for name, part in parts.items()}
        return Header(tensors, dict(file.metadata() or {}))


def open_tensors(path: Path, framework: str = "pt") -> Any:  # a safe_open, which has no annotations
    """The file, to read single tensors by ``get_tensor(name)``."""
    try:
        with _utf8_name(path) as name_of_file:
            return safe_open(name_of_file, framework)
    except SafetensorError as error:
        raise CheckpointError(f"{path}: not a safetensors file ({error}).") from error


def names_in(metadata: Mapping[str, str], key: str) -> dict[str, str]:
    """The names in a file's metadata under ``key``, which is TIED, COPIES or RENAMED."""
    try:
        names = json.loads(metadata.get(key, "{}"))
    except (ValueError, RecursionError):
        return {}
    pairs = names.items() if isinstance(names, dict) else ()
    return {name: other for name, other in pairs if isinstance(other, str)}


def _check_names(path: Path) -> None:
    """Raise if two tensors have one name: the library silently uses the last one."""
    with open(open_regular(path), "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        json.loads(file.read(min(length, 100_000_000)).decode(), object_pairs_hook=_without_repeats)  # at most that


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(name for number, (name, _) in enumerate(pairs) if name in dict(pairs[:number]))
        raise ValueError(f"{twice!r} is there twice")
    return found


@contextmanager
def _utf8_name(path: Path) -> Iterator[str]:
    """A name of the file that the library can open: it requires UTF-8."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        with tempfile.TemporaryDirectory() as folder:
            link = Path(folder, "tensors")
            link.symlink_to(path.resolve())
            yield str(link)
    else:
        yield str(path)
