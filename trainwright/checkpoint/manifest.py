"""The manifest of a checkpoint: size and checksum of each file, and a checksum of its own text."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, cast

import xxhash

from trainwright.base.files import Writer, read_regular
from trainwright.checkpoint.errors import CheckpointError, NewerFormatError

MANIFEST_NAME = "manifest.json"
FORMAT_VERSION = 1
SHARDED_FORMAT_VERSION = 2  # each process has written its parts of the tensors
FOR_PEOPLE = ("README.md",)  # files that are saved with a checkpoint, and may be edited or deleted in it
_CHECKSUM_KEY = "manifest_xxh3_128"


@dataclass(frozen=True, slots=True)
class FileEntry:
    """Size and checksum of one file. ``sha256`` is not stored; `verify` computes it with ``deep=True``."""

    bytes: int
    xxh3_128: str
    sha256: str | None = None


@dataclass(frozen=True, slots=True)
class Manifest:
    """A checkpoint's list of files, and its place among the checkpoints of its folder."""

    files: Mapping[str, FileEntry]
    iteration: int | None
    world_size: int
    saved_at: str  # UTC in ISO format. For display only: clocks jump, so the order of checkpoints ignores it.
    sequence: int = 0  # one more than the largest in the folder at the time of saving
    previous: str | None = None  # the name in ``last_checkpoint`` at the time of saving
    tag_last: bool = True  # saved as the checkpoint to resume from
    layout: Mapping[str, int] | None = None  # of a sharded checkpoint: the processes along each dimension of the mesh

    def to_bytes(self) -> bytes:
        """The text of ``manifest.json``."""
        entries = {name: {"bytes": e.bytes, "xxh3_128": e.xxh3_128} for name, e in sorted(self.files.items())}
        version = FORMAT_VERSION if self.layout is None else SHARDED_FORMAT_VERSION
        content = {"format": version, **{one.name: getattr(self, one.name) for one in fields(self)}, "files": entries}
        if self.layout is None:
            del content["layout"]
        return _dump({**content, _CHECKSUM_KEY: _checksum(content)})


class HashingFile:
    """A binary file object that counts and hashes the written bytes, and passes them to ``file`` if there is one."""

    def __init__(self, file: BinaryIO | None = None) -> None:
        self._file = file
        self._hash = xxhash.xxh3_128()
        self._bytes = 0

    def write(self, data: bytes | memoryview) -> int:
        if self._file is not None:
            self._file.write(data)
        self._hash.update(data)
        self._bytes += memoryview(data).nbytes
        return memoryview(data).nbytes

    @property
    def entry(self) -> FileEntry:
        """Size and checksum of the bytes written so far."""
        return FileEntry(self._bytes, self._hash.hexdigest())


def measure(writer: Writer, file: BinaryIO | None = None) -> FileEntry:
    """Call ``writer`` with ``file`` (None discards the bytes); returns size and checksum of what it wrote."""
    hashing = HashingFile(file)
    writer(cast(BinaryIO, hashing))  # writers only call write()
    return hashing.entry


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint folder, which may be a link."""
    path = folder / MANIFEST_NAME
    try:
        text = read_regular(path)
    except FileNotFoundError:
        raise CheckpointError(_no_manifest(folder)) from None
    if not text.strip(b"\0"):
        raise CheckpointError(f"{path}: is empty (damaged?).")
    try:
        content = json.loads(text)
        found = content.pop(_CHECKSUM_KEY)
        if content["format"] not in (FORMAT_VERSION, SHARDED_FORMAT_VERSION):
            raise NewerFormatError(
                f"{path}: format {content['format']!r}; this version of trainwright reads {FORMAT_VERSION} and"
                f" {SHARDED_FORMAT_VERSION}. A newer version has written it: update trainwright."
            )
        if found != _checksum(content) or text != _dump({**content, _CHECKSUM_KEY: found}):
            raise CheckpointError(f"{path}: its content does not match its own checksum (damaged?).")
        return _manifest(content, path)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path}: not a manifest ({type(error).__name__}: {error}).") from error


def _no_manifest(folder: Path) -> str:
    inside = sorted(path.parent.name for path in folder.glob(f"*/{MANIFEST_NAME}")) if folder.is_dir() else []
    if inside:
        return f"{folder}: is a folder of checkpoints; give one of them: {', '.join(inside[-3:])}."
    return (
        f"{folder}: no {MANIFEST_NAME}: an interrupted copy, or not a checkpoint of this library. "
        "To load only its weights, use the path of the weights file in it."
    )


def _manifest(content: Mapping[str, Any], path: Path) -> Manifest:
    """Check each value: a matching checksum excludes damage, but not text from another source."""
    files = {name: FileEntry(entry["bytes"], entry["xxh3_128"]) for name, entry in content["files"].items()}
    if not all(is_inside(name) for name in files):
        raise CheckpointError(f"{path}: lists files outside its own folder.")
    values = {field.name: content[field.name] for field in fields(Manifest) if field.name not in ("files", "layout")}
    manifest = Manifest(files, **values, layout=content.get("layout"))
    datetime.fromisoformat(manifest.saved_at)
    if not isinstance(manifest.previous, str | None) or type(manifest.tag_last) is not bool:
        raise ValueError("previous or tag_last of another type")
    if (content["format"] == SHARDED_FORMAT_VERSION) != isinstance(manifest.layout, dict):
        raise ValueError("a layout that does not fit the format")
    sizes = (manifest.layout or {}).values()
    counts = [manifest.world_size, manifest.sequence, manifest.iteration or 0, *sizes]
    if not all(type(count) is int for count in [*counts, *(entry.bytes for entry in files.values())]):
        raise ValueError("a count that is no whole number")
    return manifest


def is_inside(name: str) -> bool:
    """Whether a relative file name, such as ``a`` or ``a/b``, stays inside its folder."""
    os.fsencode(name)  # raises if it is not a possible file name
    return not any(mark in name for mark in "\\\0") and not {"", ".", ".."} & set(name.split("/"))


def _checksum(content: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(_dump(content))


def _dump(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=1, ensure_ascii=True) + "\n").encode()
