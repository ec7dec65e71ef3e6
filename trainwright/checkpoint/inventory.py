"""The checkpoints in a folder, complete or not, and the one that a resume loads. Read-only; does not import torch.

A run may write into the folder at the same time: temporary entries are ignored, and a checkpoint that is deleted or
relinked while it is inspected is skipped or inspected again.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from trainwright.checkpoint.errors import CheckpointError
from trainwright.checkpoint.files import is_temporary, real_path
from trainwright.checkpoint.folder import (
    POINTER_NAME,
    Saved,
    is_checkpoint,
    link_targets,
    read_pointer,
    resume_candidates,
)
from trainwright.checkpoint.manifest import Manifest, read_manifest
from trainwright.checkpoint.verify import file_faults, verify

_INNER = "checkpoints"  # the checkpoint folder in the run folder of the Python API
_TRIES = 3  # a link that changes faster than it can be read is reported as of the last try


@dataclass(frozen=True, slots=True)
class Found:
    """One checkpoint under one name.

    Attributes:
        folder: the real folder of the name; for a broken link, its missing target.
        points_at: the stored target of the link; None for a folder.
        manifest: None if it cannot be read. With ``deep`` verification its files have a ``sha256``.
        faults: one sentence each, beginning with the file's name; empty for a complete checkpoint.
    """

    path: Path
    folder: Path
    points_at: str | None
    manifest: Manifest | None
    faults: tuple[str, ...]

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
class Place:
    """A folder with checkpoints in it.

    Attributes:
        found: in the order of saving; links follow their folder.
        resumed: the checkpoint that a resume loads, according to this verification; None if none is valid.
        has_candidates: whether a resume would try any; False if there are only links to another folder, as in a run
            folder with a ``checkpoints/`` folder.
        last: the name in ``last_checkpoint``; None if there is none.
        pointer_fault: what is wrong with ``last_checkpoint``; "" if nothing.
    """

    folder: Path
    found: tuple[Found, ...]
    resumed: Found | None
    has_candidates: bool
    last: str | None
    pointer_fault: str


def look_at(path: Path, *, contents: bool = True, deep: bool = False) -> Found:
    """Inspect and verify one checkpoint; without ``contents``, only the sizes of its files."""
    for _ in range(_TRIES):
        folder, points_at = real_path(path), _link(path)
        manifest, faults = _faults(folder, contents=contents, deep=deep)
        if not faults or real_path(path) == folder:
            break
    return Found(path, folder, points_at, manifest, tuple(faults))


def checkpoint_paths(folder: Path) -> list[Path]:
    """The checkpoint paths in a run folder, without reading them; hidden ones only if no link points to them."""
    return [path for there in (folder, folder / _INNER) for path in _paths(there)]


def places(folder: Path, *, contents: bool = True, deep: bool = False) -> list[Place]:
    """The checkpoints in a run folder, or in its checkpoint folder; an empty list if there are none."""
    both = [_place(there, contents=contents, deep=deep) for there in (folder, folder / _INNER)]
    return [place for place in both if place.found or place.last is not None or place.pointer_fault]


def _place(folder: Path, *, contents: bool, deep: bool) -> Place:
    for _ in range(_TRIES):
        last, fault = _pointer(folder)
        candidates, paths = resume_candidates(folder), _paths(folder)
        found = _look_at_all(paths, contents=contents, deep=deep)
        if found or not paths:  # otherwise all were deleted meanwhile, and there may be new ones
            break
    found.sort(key=lambda entry: (Saved(entry.path, entry.manifest).rank, entry.points_at is not None, entry.path.name))
    return Place(folder, tuple(found), _resumed(candidates, found), bool(candidates), last, fault)


def _look_at_all(paths: list[Path], *, contents: bool, deep: bool) -> list[Found]:
    looked: dict[Path, Found] = {}  # by real folder: a checkpoint with two names is read once
    found = []
    for path in paths:
        known = looked.get(real_path(path))
        entry = (
            look_at(path, contents=contents, deep=deep)
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
    for _ in range(_TRIES):
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


def _paths(folder: Path) -> list[Path]:
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


def _faults(folder: Path, *, contents: bool, deep: bool) -> tuple[Manifest | None, list[str]]:
    if not folder.is_dir():
        return None, [f"{folder.name} does not exist"]
    manifest = None
    try:
        manifest = read_manifest(folder)
        if not deep:
            return manifest, file_faults(folder, manifest, contents=contents)[0]
        return verify(folder, deep=True), []
    except (CheckpointError, OSError) as error:
        return manifest, _fault_lines(error, folder)


def _fault_lines(error: Exception, folder: Path) -> list[str]:
    """The faults in an error's message, one per line, without the folder's path."""
    if isinstance(error, OSError) and error.strerror:
        return [f"{Path(error.filename or folder).name} cannot be read ({error.strerror})"]
    first, *others = str(error).splitlines()
    return [line.strip() for line in others] or [first.replace(f"{folder}{os.sep}", "").removeprefix(f"{folder}: ")]


def _resumed(candidates: list[Path], found: list[Found]) -> Found | None:
    for candidate in candidates:
        names = [entry for entry in found if entry.folder == real_path(candidate) and entry.is_complete]
        if names:
            return next((entry for entry in names if entry.path == candidate), names[0])
    return None
