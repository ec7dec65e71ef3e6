"""Verification of a checkpoint against its manifest, and of all checkpoints in a folder.

Every load verifies first. The inspection of a folder is read-only and does not import torch. A run may write into the
folder at the same time: temporary entries are ignored, and a checkpoint that is deleted or relinked while it is
inspected is skipped or inspected again.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TypeVar

import xxhash

from trainwright.base.errors import MissingFileError
from trainwright.base.files import (
    PathLike,
    irregular,
    is_about_access,
    is_temporary,
    named,
    open_regular,
    real_path,
)
from trainwright.checkpoint.errors import CheckpointError
from trainwright.checkpoint.folder import (
    POINTER_NAME,
    Saved,
    is_checkpoint,
    link_targets,
    read_pointer,
    resume_candidates,
)
from trainwright.checkpoint.manifest import FOR_PEOPLE, FileEntry, Manifest, read_manifest

_CHUNK_BYTES = 1 << 20
_TRIES = 100  # for a checkpoint that is replaced while it is read
_INSPECTION_TRIES = 3  # a link that changes faster than it can be read is reported as of the last try
_INNER = "checkpoints"  # the checkpoint folder in the run folder of the Python API
T = TypeVar("T")
Identify = Callable[[PathLike], tuple[Path, object]]


def verify(path: PathLike, *, deep: bool = False) -> Manifest:
    """Check every file of a checkpoint against its manifest; returns the manifest.

    Files that the manifest does not list are ignored: nothing reads them.

    Args:
        deep: also read each state, and compute each file's ``sha256`` to compare with an external list.

    Raises:
        MissingFileError: there is no such folder.
        CheckpointError: a file is missing or damaged. The message lists every fault.
        OSError: a file cannot be read now. It may be complete.
    """
    return read_unchanged(path, partial(_verify, deep=deep))


def identity(path: PathLike) -> tuple[Path, Manifest | None]:
    """The checkpoint that a name refers to now: its folder and its manifest, which differs between any two saves."""
    folder = real_path(path) if os.path.islink(path) else Path(path)
    try:
        return folder, read_manifest(folder)
    except (CheckpointError, OSError):
        return folder, None


def read_unchanged(path: PathLike, read: Callable[[Path], T], *, identify: Identify = identity) -> T:
    """``read(folder)`` with the folder that ``path`` refers to; repeated if the path changes meanwhile.

    ``model_best`` may be saved again at any moment: the link is resolved once, so that all files are from one save.

    Args:
        identify: `identity`, or a function that returns one rank's `identity` on all ranks.
    """
    for tries_left in reversed(range(_TRIES)):
        before = identify(path)
        try:
            content = read(before[0])
        except Exception as error:
            if not tries_left or identify(path) == before:
                raise _with_path(path, error, before[0]) from error.__cause__
        else:
            if identify(path) == before:
                return content
    raise CheckpointError(f"{path}: another process replaces it faster than it can be read.")


def _with_path(path: PathLike, error: Exception, folder: Path) -> Exception:
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

    Files for people, which may edit them, have none.

    Args:
        contents: False compares only sizes and reads no file: it does not find changed bytes.
        sha256: also compute the ``sha256`` of each file.

    Raises:
        OSError: a file cannot be read now, which is no damage.
    """
    measured: dict[str, FileEntry] = {}
    faults = []
    for name, expected in manifest.files.items():
        if name in FOR_PEOPLE:
            measured[name] = expected
            continue
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
        if is_about_access(error):
            raise named(error, path) from None
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
    from trainwright.checkpoint.safetensors_header import read_header
    from trainwright.checkpoint.shards import ShardReader
    from trainwright.checkpoint.state_files import MODEL, NOT_OURS, read_state

    if manifest.layout is not None:
        for name, stored in ShardReader(folder, MODEL, manifest.files).stored().items():
            if not stored.entry.has_each_value_once():
                raise CheckpointError(f"{folder}: {name}: its parts do not hold each value once.")
            stored.whole()

    for name in manifest.files:
        if name in (*NOT_OURS, *FOR_PEOPLE) or "/" in name:  # files for people and other programs
            continue
        if name.endswith(".json"):
            read_state(folder, manifest, name.removesuffix(".json"))
        elif name.endswith(".safetensors"):
            read_header(folder / name)


@dataclass(frozen=True, slots=True)
class CheckpointReport:
    """One checkpoint under one name."""

    path: Path
    folder: Path  # the real folder of the name; for a broken link, its missing target
    points_at: str | None  # the stored target of the link; None for a folder
    manifest: Manifest | None  # None if it cannot be read. With ``deep`` verification its files have a ``sha256``.
    faults: tuple[str, ...]  # one sentence each, beginning with the file's name; empty for a complete checkpoint
    is_unknown: bool = False  # a file cannot be read now: it may be complete

    @property
    def is_complete(self) -> bool:
        return not self.faults

    @property
    def size_bytes(self) -> int | None:
        """Total size of the files in the manifest."""
        return None if self.manifest is None else sum(entry.bytes for entry in self.manifest.files.values())

    @property
    def saved_at(self) -> datetime | None:
        return None if self.manifest is None else datetime.fromisoformat(self.manifest.saved_at)


@dataclass(frozen=True, slots=True)
class FolderReport:
    """A folder with checkpoints in it."""

    folder: Path
    found: tuple[CheckpointReport, ...]  # in the order of saving; links follow their folder
    resumed: CheckpointReport | None  # what a resume loads, according to this verification; None if none is valid
    has_candidates: bool  # whether a resume would try any; False for a run folder that has only links to another one
    last: str | None  # the name in ``last_checkpoint``; None if there is none
    pointer_fault: str  # what is wrong with ``last_checkpoint``; "" if nothing


def inspect_checkpoint(path: Path, *, contents: bool = True, deep: bool = False) -> CheckpointReport:
    """Inspect and verify one checkpoint; without ``contents``, only the sizes of its files."""
    for _ in range(_INSPECTION_TRIES):
        folder, points_at = real_path(path), _link(path)
        manifest, faults, is_unknown = _faults(folder, contents=contents, deep=deep)
        if not faults or real_path(path) == folder:
            break
    return CheckpointReport(path, folder, points_at, manifest, tuple(faults), is_unknown)


def checkpoint_paths(folder: Path) -> list[Path]:
    """The checkpoint paths in a run folder, without reading them; hidden ones only if no link points to them."""
    return [path for there in (folder, folder / _INNER) for path in _checkpoint_paths(there)]


def inspect_folders(folder: Path, *, contents: bool = True, deep: bool = False) -> list[FolderReport]:
    """The checkpoints in a run folder, or in its checkpoint folder; an empty list if there are none."""
    both = [_inspect_folder(there, contents=contents, deep=deep) for there in (folder, folder / _INNER)]
    return [place for place in both if place.found or place.last is not None or place.pointer_fault]


def with_other_names(found: Iterable[CheckpointReport]) -> list[tuple[CheckpointReport, list[CheckpointReport]]]:
    """Each checkpoint once, under its first name, and with its other names: the links to the same folder."""
    entries = [*found]
    by_folder: dict[Path, list[CheckpointReport]] = {}
    for entry in sorted(entries, key=lambda one: one.points_at is not None):
        by_folder.setdefault(entry.folder, []).append(entry)
    place = {id(entry): number for number, entry in enumerate(entries)}
    return sorted(((first, others) for first, *others in by_folder.values()), key=lambda names: place[id(names[0])])


def _inspect_folder(folder: Path, *, contents: bool, deep: bool) -> FolderReport:
    for _ in range(_INSPECTION_TRIES):
        last, fault = _pointer(folder)
        candidates, paths = resume_candidates(folder), _checkpoint_paths(folder)
        found = _inspect_all(paths, contents=contents, deep=deep)
        if found or not paths:  # otherwise all were deleted meanwhile, and there may be new ones
            break
    found.sort(
        key=lambda entry: (Saved(entry.path, entry.manifest).sequence, entry.points_at is not None, entry.path.name)
    )
    return FolderReport(folder, tuple(found), _resumed(candidates, found), bool(candidates), last, fault)


def _inspect_all(paths: list[Path], *, contents: bool, deep: bool) -> list[CheckpointReport]:
    looked: dict[Path, CheckpointReport] = {}  # by real folder: a checkpoint with two names is read once
    found = []
    for path in paths:
        known = looked.get(real_path(path))
        entry = (
            inspect_checkpoint(path, contents=contents, deep=deep)
            if known is None
            else replace(known, path=path, points_at=_link(path))
        )
        looked[entry.folder] = entry
        if os.path.lexists(path):  # otherwise it was deleted meanwhile
            found.append(entry)
    return found


def _pointer(folder: Path) -> tuple[str | None, str]:
    """The name in ``last_checkpoint``, and what is wrong with it."""
    last = None
    for _ in range(_INSPECTION_TRIES):
        try:
            last = read_pointer(folder)
            is_there = last is None or (folder / last).is_dir()
        except CheckpointError as error:
            return None, str(error).removeprefix(f"{folder / POINTER_NAME}: ").rstrip(".")
        except OSError as error:
            return None, f"cannot be read ({error.strerror})"
        if is_there:
            return last, ""
    return last, f"names {last!r}, which does not exist"


def _checkpoint_paths(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    # Links may also be in the parent folder: epoch_3 is next to checkpoints/.
    linked = link_targets(folder) | (link_targets(folder.parent) if folder.name == _INNER else set())
    return [path for path in sorted(folder.iterdir()) if _is_name(path, linked)]


def _is_name(path: Path, linked: Iterable[Path]) -> bool:
    if is_temporary(path.name):
        return False
    if path.is_symlink() and not path.exists():  # a broken link
        return not path.name.startswith(".") and real_path(path.parent) in real_path(path).parents
    return is_checkpoint(path) and not (path.name.startswith(".") and real_path(path) in linked)


def _link(path: Path) -> str | None:
    try:
        return os.readlink(path)
    except OSError:  # a folder, or deleted
        return None


def _faults(folder: Path, *, contents: bool, deep: bool) -> tuple[Manifest | None, list[str], bool]:
    """The manifest, the faults, and whether one is that a file cannot be read now."""
    if not folder.is_dir():
        return None, [f"{folder.name} does not exist"], False
    manifest = None
    try:
        manifest = read_manifest(folder)
        if not deep:
            return manifest, file_faults(folder, manifest, contents=contents)[0], False
        return verify(folder, deep=True), [], False
    except (CheckpointError, OSError) as error:
        return manifest, _fault_lines(error, folder), isinstance(error, OSError) and is_about_access(error)


def _fault_lines(error: Exception, folder: Path) -> list[str]:
    """The faults in an error's message, one per line, without the folder's path."""
    if isinstance(error, OSError) and error.strerror:
        return [f"{Path(error.filename or folder).name} cannot be read ({error.strerror})"]
    first, *others = str(error).splitlines()
    return [line.strip() for line in others] or [first.replace(f"{folder}{os.sep}", "").removeprefix(f"{folder}: ")]


def _resumed(candidates: list[Path], found: list[CheckpointReport]) -> CheckpointReport | None:
    for candidate in candidates:
        names = [entry for entry in found if entry.folder == real_path(candidate)]
        if any(entry.is_unknown for entry in names):
            return None
        if names and names[0].is_complete:
            return next((entry for entry in names if entry.path == candidate), names[0])
    return None
