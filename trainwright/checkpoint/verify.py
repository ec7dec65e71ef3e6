"""Verification: is a checkpoint what was saved? Every load asks this first."""

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
TRIES = 100  # of reading a checkpoint whose name is given to another one meanwhile
T = TypeVar("T")


def verify(path: PathLike, *, deep: bool = False) -> Manifest:
    """Check every file of a checkpoint against its manifest; returns the manifest.

    Files that the manifest does not list are no fault: nothing reads them.

    Args:
        deep: also read each state back, and fill in each file's ``sha256``, to compare with a list kept elsewhere.

    Raises:
        MissingFileError: there is no such folder.
        CheckpointError: a file is missing or is not as it was written. The message lists every fault.
    """
    return read_unchanged(path, partial(_verify, deep=deep))


def identity(path: PathLike) -> tuple[Path, Manifest | None]:
    """Which checkpoint a name leads to now: its folder, and the manifest, which no two saves have alike."""
    folder = real_path(path) if os.path.islink(path) else Path(path)
    try:
        return folder, read_manifest(folder)
    except (CheckpointError, OSError):
        return folder, None


def read_unchanged(path: PathLike, read: Callable[[Path], T]) -> T:
    """``read(folder)`` of the folder that ``path`` leads to; once more if another one has its place by then.

    ``model_best`` may be saved again at any moment: the link is followed once, so that nothing is read of two saves.

    Raises:
        CheckpointError: it is saved again more quickly than it can be read.
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
    raise CheckpointError(f"{path}: is saved again more quickly than it can be read.")


def in_terms_of(path: PathLike, error: Exception, folder: Path) -> Exception:
    """``error`` with the name that the user gave, where it tells of the folder that the name leads to."""
    if folder == Path(path) or type(error) not in (CheckpointError, MissingFileError):
        return error
    return type(error)(str(error).replace(str(folder), str(path)))


def _verify(folder: Path, *, deep: bool) -> Manifest:
    if not folder.is_dir():
        raise MissingFileError(f"{folder}: no such checkpoint folder.")
    manifest = read_manifest(folder)
    faults, measured = file_faults(folder, manifest, sha256=deep)
    if faults:
        raise CheckpointError("\n".join([f"{folder}: not what was saved.", *(f"  {fault}" for fault in faults)]))
    if deep:
        _read_back(folder, manifest)
    return replace(manifest, files=measured)


def file_faults(
    folder: Path, manifest: Manifest, *, contents: bool = True, sha256: bool = False
) -> tuple[list[str], Mapping[str, FileEntry]]:
    """What is wrong with the files of a checkpoint, each fault beginning with the file's name, and what they are.

    Args:
        contents: False compares sizes alone, which reads nothing: a changed byte is not found.
        sha256: fill that in too.
    """
    measured: dict[str, FileEntry] = {}
    faults = []
    for name, expected in manifest.files.items():
        fault, measured[name] = _check_file(folder / name, expected, contents=contents, sha256=sha256)
        if fault:
            faults.append(f"{name} {fault}")
    return faults, measured


def _check_file(path: Path, expected: FileEntry, *, contents: bool, sha256: bool) -> tuple[str, FileEntry]:
    """What is wrong with a file, as the end of a sentence ("" if nothing), and what it is."""
    try:
        found = path.stat()
        if (kind := irregular(path)) is not None:  # reading a pipe would wait for ever
            return f"is no regular file but {kind}", expected
        if found.st_size != expected.bytes:  # said without reading it
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
    # Here: all else of this file does without torch.
    from trainwright.checkpoint.state_files import NOT_OURS, read_state
    from trainwright.checkpoint.tensors import read_tensors

    for name in manifest.files:
        if name in NOT_OURS or "/" in name:  # written for people and other programs
            continue
        if name.endswith(".json"):
            read_state(folder, manifest, name.removesuffix(".json"))
        elif name.endswith(".safetensors"):
            read_tensors(folder / name)
