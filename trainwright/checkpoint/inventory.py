"""What checkpoints a folder holds, whole or not, and which one a resume takes. Reads only, and needs no torch.

A run may be writing in the folder meanwhile: its temporary entries are no checkpoints, and one that is deleted or
linked anew while it is looked at is left out or looked at again.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from trainwright.checkpoint.candidates import resume_candidates
from trainwright.checkpoint.errors import CheckpointError
from trainwright.checkpoint.files import is_temporary, real_path
from trainwright.checkpoint.folder import POINTER_NAME, is_checkpoint, link_targets, read_pointer
from trainwright.checkpoint.manifest import Manifest, read_manifest
from trainwright.checkpoint.order import Saved
from trainwright.checkpoint.verify import file_faults, verify

_INNER = "checkpoints"  # where a run of the objects door keeps them
_TRIES = 3  # a link that moves faster than it can be read is taken as it was at the last look


@dataclass(frozen=True, slots=True)
class Found:
    """One checkpoint under one name.

    Attributes:
        folder: the real folder that the name leads to; for a link to nothing, what would be there.
        points_at: where the link leads, as it is stored; None for a folder.
        manifest: None if it cannot be read. With ``deep`` verification its files have their ``sha256``.
        faults: one sentence each, beginning with the file's name; none for a whole checkpoint.
    """

    path: Path
    folder: Path
    points_at: str | None
    manifest: Manifest | None
    faults: tuple[str, ...]

    @property
    def is_whole(self) -> bool:
        return not self.faults

    @property
    def size_bytes(self) -> int | None:
        """Of the files that the manifest lists."""
        return None if self.manifest is None else sum(entry.bytes for entry in self.manifest.files.values())

    @property
    def saved_at(self) -> datetime | None:
        return None if self.manifest is None else datetime.fromisoformat(self.manifest.saved_at)


@dataclass(frozen=True, slots=True)
class Place:
    """A folder with checkpoints in it.

    Attributes:
        found: the first saved stands first, and a name for it behind it.
        resumed: the one that a resume takes, as far as it was looked at; None if none is good.
        has_candidates: whether a resume would look at any; not where there are only links to another folder, as in the
            folder of a run beside its ``checkpoints/``.
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
    """One checkpoint, verified: by the sizes alone if not ``contents``."""
    for _ in range(_TRIES):
        folder, points_at = real_path(path), _link(path)
        manifest, faults = _faults(folder, contents=contents, deep=deep)
        if not faults or real_path(path) == folder:
            break
    return Found(path, folder, points_at, manifest, tuple(faults))


def checkpoint_paths(folder: Path) -> list[Path]:
    """The names of the checkpoints in a run's folder, unread; a hidden one only where no link leads to it."""
    return [path for there in (folder, folder / _INNER) for path in _paths(there)]


def places(folder: Path, *, contents: bool = True, deep: bool = False) -> list[Place]:
    """The checkpoints in a run's folder, or in the folder of its checkpoints; an empty list if there are none."""
    both = [_place(there, contents=contents, deep=deep) for there in (folder, folder / _INNER)]
    return [place for place in both if place.found or place.last is not None or place.pointer_fault]


def _place(folder: Path, *, contents: bool, deep: bool) -> Place:
    for _ in range(_TRIES):
        last, fault = _pointer(folder)
        candidates, paths = resume_candidates(folder), _paths(folder)
        found = _look_at_all(paths, contents=contents, deep=deep)
        if found or not paths:  # else all were deleted while we looked, and others may be there now
            break
    found.sort(key=lambda entry: (Saved(entry.path, entry.manifest).rank, entry.points_at is not None, entry.path.name))
    return Place(folder, tuple(found), _resumed(candidates, found), bool(candidates), last, fault)


def _look_at_all(paths: list[Path], *, contents: bool, deep: bool) -> list[Found]:
    looked: dict[Path, Found] = {}  # by real folder: one with two names is read once
    found = []
    for path in paths:
        known = looked.get(real_path(path))
        entry = (
            look_at(path, contents=contents, deep=deep)
            if known is None
            else replace(known, path=path, points_at=_link(path))
        )
        looked[entry.folder] = entry
        if os.path.lexists(path):  # else it was deleted while we looked
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
    return last, f"names {last!r}, which is not there"


def _paths(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    # Links may lie beside the folder too, as epoch_3 beside checkpoints/ does.
    linked = link_targets(folder) | (link_targets(folder.parent) if folder.name == _INNER else set())
    return [path for path in sorted(folder.iterdir()) if _is_name(path, linked)]


def _is_name(path: Path, linked: Iterable[Path]) -> bool:
    if is_temporary(path.name):
        return False
    if path.is_symlink() and not path.exists():  # what it led to is gone
        return not path.name.startswith(".") and real_path(path.parent) in real_path(path).parents
    return is_checkpoint(path) and not (path.name.startswith(".") and real_path(path) in linked)


def _link(path: Path) -> str | None:
    try:
        return os.readlink(path)
    except OSError:  # a folder, or nothing any more
        return None


def _faults(folder: Path, *, contents: bool, deep: bool) -> tuple[Manifest | None, list[str]]:
    if not folder.is_dir():
        return None, [f"{folder.name} is not there"]
    manifest = None
    try:
        manifest = read_manifest(folder)
        if not deep:
            return manifest, file_faults(folder, manifest, contents=contents)[0]
        return verify(folder, deep=True), []
    except (CheckpointError, OSError) as error:
        return manifest, _told(error, folder)


def _told(error: Exception, folder: Path) -> list[str]:
    """Each fault that an error tells of, without the folder, which is known."""
    if isinstance(error, OSError) and error.strerror:
        return [f"{Path(error.filename or folder).name} cannot be read ({error.strerror})"]
    first, *others = str(error).splitlines()
    return [line.strip() for line in others] or [first.replace(f"{folder}{os.sep}", "").removeprefix(f"{folder}: ")]


def _resumed(candidates: list[Path], found: list[Found]) -> Found | None:
    for candidate in candidates:
        names = [entry for entry in found if entry.folder == real_path(candidate) and entry.is_whole]
        if names:
            return next((entry for entry in names if entry.path == candidate), names[0])
    return None
