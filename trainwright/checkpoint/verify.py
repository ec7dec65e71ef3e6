"""Verification of a checkpoint against its manifest. Every load verifies first."""

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import xxhash

from trainwright.checkpoint.errors import CheckpointError
from trainwright.checkpoint.files import PathLike, irregular, open_regular, real_path
from trainwright.checkpoint.manifest import FileEntry, Manifest, read_manifest
from trainwright.config.errors import MissingFileError, UserError

_CHUNK_BYTES = 1 << 20
TRIES = 100  # for a checkpoint that is replaced while it is read
T = TypeVar("T")


def verify(path: PathLike, *, deep: bool = False) -> Manifest:
    """Check every file of a checkpoint against its manifest; returns the manifest.

    Files that the manifest does not list are ignored: nothing reads them.

    Args:
        deep: also read each state, and compute each file's ``sha256`` to compare with an external list.

    Raises:
        MissingFileError: there is no such folder.
        CheckpointError: a file is missing or damaged. The message lists every fault.
    """
    return read_unchanged(path, partial(_verify, deep=deep))


def identity(path: PathLike) -> tuple[Path, Manifest | None]:
    """The checkpoint that a name refers to now: its folder and its manifest, which differs between any two saves."""
    folder = real_path(path) if os.path.islink(path) else Path(path)
    try:
        return folder, read_manifest(folder)
    except (CheckpointError, OSError):
        return folder, None


def read_unchanged(path: PathLike, read: Callable[[Path], T]) -> T:
    """``read(folder)`` with the folder that ``path`` refers to; repeated if the path changes meanwhile.

    ``model_best`` may be saved again at any moment: the link is resolved once, so that all files are from one save.

    Raises:
        CheckpointError: another process replaces it faster than it can be read.
    """
    for tries_left in reversed(range(TRIES)):
        before = identity(path)
        try:
            content = read(before[0])
        except (UserError, OSError) as error:
            if not tries_left or identity(path) == before:
                raise in_terms_of(path, error, before[0]) from None
        else:
            if identity(path) == before:
                return content
    raise CheckpointError(f"{path}: another process replaces it faster than it can be read.")


def in_terms_of(path: PathLike, error: Exception, folder: Path) -> Exception:
    """``error`` with the path that the user passed, in place of the folder that the path refers to."""
    if folder == Path(path) or type(error) not in (CheckpointError, MissingFileError):
        return error
    return type(error)(str(error).replace(str(folder), str(path)))


def _verify(folder: Path, *, deep: bool) -> Manifest:
    if not folder.is_dir():
        raise MissingFileError(f"{folder}: no such checkpoint folder.")
    manifest = read_manifest(folder)
    faults, measured = file_faults(folder, manifest, sha256=deep)
    if faults:
        raise CheckpointError("\n".join([f"{folder}: is damaged.", *(f"  {fault}" for fault in faults)]))
    if deep:
        _read_back(folder, manifest)
    return replace(manifest, files=measured)


def file_faults(
    folder: Path, manifest: Manifest, *, contents: bool = True, sha256: bool = False
) -> tuple[list[str], Mapping[str, FileEntry]]:
    """The faults of a checkpoint's files, each beginning with the file's name, and the measured entries.

    Args:
        contents: False compares only sizes and reads no file: it does not find changed bytes.
        sha256: also compute the ``sha256`` of each file.
    """
    measured: dict[str, FileEntry] = {}
    faults = []
    for name, expected in manifest.files.items():
        fault, measured[name] = _check_file(folder / name, expected, contents=contents, sha256=sha256)
        if fault:
            faults.append(f"{name} {fault}")
    return faults, measured


def _check_file(path: Path, expected: FileEntry, *, contents: bool, sha256: bool) -> tuple[str, FileEntry]:
    """The fault of a file, as the end of a sentence ("" if none), and its measured entry."""
    try:
        found = path.stat()
        if (kind := irregular(path)) is not None:  # reading a pipe would block
            return f"is {kind}, not a regular file", expected
        if found.st_size != expected.bytes:  # reported without reading the file
            return f"has {found.st_size:,} bytes, the manifest says {expected.bytes:,} (an interrupted copy?)", expected
        measured = _measure_file(path, sha256=sha256) if contents else expected
    except FileNotFoundError:
        return "is missing", expected
    except OSError as error:
        return f"cannot be read ({error.strerror})", expected
    if measured.xxh3_128 != expected.xxh3_128:
        return f"has checksum {measured.xxh3_128}, the manifest says {expected.xxh3_128} (damaged)", measured
    return "", measured


def _measure_file(path: Path, *, sha256: bool) -> FileEntry:
    fast, slow, size = xxhash.xxh3_128(), hashlib.sha256(), 0
    with open(open_regular(path), "rb", buffering=0) as file:
        buffer = memoryview(bytearray(_CHUNK_BYTES))
        while count := file.readinto(buffer):
            fast.update(buffer[:count])
            if sha256:
                slow.update(buffer[:count])
            size += count
    return FileEntry(size, fast.hexdigest(), slow.hexdigest() if sha256 else None)


def _read_back(folder: Path, manifest: Manifest) -> None:
    # Imported here: the rest of this file does not need torch.
    from trainwright.checkpoint.state_files import NOT_OURS, read_state
    from trainwright.checkpoint.tensors import read_tensors

    for name in manifest.files:
        if name in NOT_OURS or "/" in name:  # files for people and other programs
            continue
        if name.endswith(".json"):
            read_state(folder, manifest, name.removesuffix(".json"))
        elif name.endswith(".safetensors"):
            read_tensors(folder / name)
