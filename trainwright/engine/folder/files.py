"""The files that runs wrote into a folder: only these are replaced, or moved when a new run starts.

Their names are listed in ``.trainwright.json`` in the folder. Checkpoints and links to them are recognized by
name and content; where the list is lost, the other files by their names, if there are checkpoints.

Moving an earlier run survives a crash: the files to move are listed first, and the next start completes the move.
"""

import glob
import json
import os
import re
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from trainwright.base.files import atomic_write, make_folders, open_regular, remove_stale, sync_folder
from trainwright.checkpoint.folder import POINTER_NAME, is_checkpoint
from trainwright.events.formats import CURVES_NAME, LOSSES_NAME, METRICS_NAME, RECORD_NAME

LIST_NAME = ".trainwright.json"
EARLIER_RUNS = "earlier_runs"
TRACKERS_NAME = "trackers.json"  # of the writers of experiment trackers
_TRACES = "profile/rank[0-9]*.[0-9]*.pt.trace.json"
_MAX_READ = 1 << 26  # bytes of the list
_HIDDEN_CHECKPOINT = re.compile(r"\.(?!tmp-).+-(\d{7,}|none)(-\d+)?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class FileNames:
    """Where the runs of an API write, relative to the output folder, with ``/`` as separator."""

    config_file: str
    tables: tuple[str, ...] = (METRICS_NAME, LOSSES_NAME)
    event_folders: tuple[str, ...] = (".",)
    checkpoints: str = "."  # the folder of checkpoints
    checkpoint_name: re.Pattern[str] = re.compile(r".+_(\d{7,}|best|final)", re.DOTALL)
    link_name: re.Pattern[str] = re.compile(r".+_(best|final)", re.DOTALL)  # of links in the output folder
    card: str | None = None  # the file of a model card

    @property
    def pointer(self) -> str:
        """The file that names the latest checkpoint."""
        return _join(self.checkpoints, POINTER_NAME)

    @property
    def patterns(self) -> list[str]:
        """The files that a run may have written, as far as their names show it."""
        stem, _, suffix = self.config_file.partition(".")
        events = [_join(glob.escape(folder), "events.out.tfevents.[0-9]*.*") for folder in self.event_folders]
        versions = f"{stem}.[0-9]*.{suffix}"  # of the configuration, from other starts of a run
        return [*self.names(1), versions, CURVES_NAME, "log.txt.rank[0-9]*", *events]

    def names(self, world_size: int) -> list[str]:
        """The files that every run writes."""
        logs = ["log.txt", *(f"log.txt.rank{rank}" for rank in range(1, world_size))]
        return [self.config_file, *logs, *self.tables, RECORD_NAME, self.pointer, TRACKERS_NAME, _TRACES]


class RunFiles:
    """The files in ``folder`` that runs wrote. Names are relative to it, with ``/`` as separator."""

    def __init__(self, folder: Path, file_names: FileNames) -> None:
        self.folder = folder
        self.file_names = file_names

    def is_own(self, name: str) -> bool:
        """Whether ``name`` is unused, empty, or written by a run."""
        path = self.folder / name
        if not os.path.lexists(path) or (path.is_file() and path.stat().st_size == 0):
            return True
        return _is_in(name, self._names())

    def has_checkpoints(self) -> bool:
        """Whether the folder has checkpoints of a run."""
        return next(self._checkpoints(), None) is not None

    def add(self, names: Iterable[str]) -> None:
        """Record that a run writes ``names``, which may be patterns."""
        files = sorted({*self._names(), *names})
        if files != self._read().get("files"):
            self._write({"files": files})

    def event_names(self) -> list[str]:
        """The patterns of the TensorBoard files that this process writes."""
        own = f"events.out.tfevents.*.{glob.escape(socket.gethostname())}.{os.getpid()}.*"
        return [_join(glob.escape(folder), own) for folder in self.file_names.event_folders]

    def entries(self) -> list[str]:
        """Everything that runs wrote: files, links, and checkpoints, which are folders."""
        found = self._existing(self._names())
        return [*dict.fromkeys([*found, *self._checkpoints(), *self._links()])]

    # Moving an earlier run.

    def move_aside(self) -> Path:
        """Move all entries into a new folder in ``earlier_runs``; return it."""
        shelf = self.folder / EARLIER_RUNS
        numbers = [int(name) for name in _names_in(shelf) if re.fullmatch(r"[0-9]{1,9}", name)]
        place = f"{EARLIER_RUNS}/{1 + max(numbers, default=0):03d}"
        self._write({"files": self._names(), "moving": {"entries": self.entries(), "to": place}})
        self.complete_move()
        return self.folder / place

    def is_moving(self) -> bool:
        """Whether a move was interrupted."""
        return "moving" in self._read()

    def complete_move(self) -> None:
        """Finish a move: each entry is at its source or at its target."""
        content = self._read()
        moving = content.get("moving")
        if not isinstance(moving, dict):
            return
        place = self.folder / moving["to"]
        sources, targets = {self.folder}, {place}
        make_folders(place)
        for name in moving["entries"]:
            source, target = self.folder / name, place / name
            if os.path.lexists(source) and not os.path.lexists(target):
                make_folders(target.parent)
                os.rename(source, target)  # links among them are relative, so they stay valid
                sources.add(source.parent)
                targets.add(target.parent)
        for folder in (*targets, *sources):  # the new names first: an entry must not be without a name on the disk
            sync_folder(folder)
        for folder in sorted(sources - {self.folder}, reverse=True):
            if self.folder in folder.parents and not _names_in(folder):
                folder.rmdir()
        remove_stale(place)
        atomic_write(place / LIST_NAME, _encode({"files": content.get("files", [])}))
        self._write({"files": []})

    # The list.

    def _read(self) -> dict[str, Any]:
        """The list's content; empty if there is none, or if the file is not such a list."""
        try:
            with open(open_regular(self.folder / LIST_NAME), "rb") as file:
                read = json.loads(file.read(_MAX_READ))
        except (OSError, ValueError, RecursionError):
            return {}
        if not isinstance(read, dict) or not _are_names(read.get("files")):
            return {}
        moving = read.get("moving")
        if moving is not None and not (
            isinstance(moving, dict) and _are_names(moving.get("entries")) and _are_names([moving.get("to")])
        ):
            return {}
        return read

    def _names(self) -> list[str]:
        """The listed names; where the list is lost, those of files that a run may write."""
        files: list[str] | None = self._read().get("files")
        if files is None and self.has_checkpoints():
            return self._existing(self.file_names.patterns)
        return files or []

    def _write(self, content: dict[str, Any]) -> None:
        make_folders(self.folder)
        atomic_write(self.folder / LIST_NAME, _encode(content))

    # Files in the folder.

    def _existing(self, names: Iterable[str]) -> list[str]:
        """The files of these names, which may be patterns."""
        found: set[str] = set()
        for name in names:
            if "*" in name:
                found.update(glob.glob(name, root_dir=self.folder))
            elif os.path.lexists(self.folder / name):
                found.add(name)
        return sorted(found)

    def _checkpoints(self) -> Iterator[str]:
        folder, shape = self.file_names.checkpoints, self.file_names.checkpoint_name
        for name in _names_in(self.folder / folder):
            path = self.folder / folder / name
            is_named_so = shape.fullmatch(name) or _HIDDEN_CHECKPOINT.fullmatch(name)
            if is_named_so and not path.is_symlink() and path.is_dir() and is_checkpoint(path):
                yield _join(folder, name)

    def _links(self) -> Iterator[str]:
        """Links to checkpoints: in the output folder, and in the folder of checkpoints."""
        places = dict.fromkeys(
            [(".", self.file_names.link_name), (self.file_names.checkpoints, self.file_names.checkpoint_name)]
        )
        for folder, shape in places:
            for name in _names_in(self.folder / folder):
                if shape.fullmatch(name) and self.is_own_link(_join(folder, name)):
                    yield _join(folder, name)

    def is_own_link(self, name: str) -> bool:
        """Whether ``name`` is a link into the folder of checkpoints, whose target may be deleted, or a checkpoint."""
        path = self.folder / name
        if path.is_dir() and not path.is_symlink():  # of a file system without links
            return is_checkpoint(path)
        if not path.is_symlink() or os.path.isabs(os.readlink(path)):
            return False
        # Not Path.resolve, which raises for circular links.
        return os.path.dirname(os.path.realpath(path)) == os.path.realpath(self.folder / self.file_names.checkpoints)


def _encode(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=1, sort_keys=True) + "\n").encode()


def _is_in(name: str, listed: Iterable[str]) -> bool:
    return any(name == pattern or ("*" in pattern and fnmatchcase(name, pattern)) for pattern in listed)


def _are_names(names: Any) -> bool:
    return isinstance(names, list) and all(
        isinstance(name, str) and name and not name.startswith("/") and ".." not in name.split("/") and "\0" not in name
        for name in names
    )


def _join(folder: str, name: str) -> str:
    return name if folder == "." else f"{folder}/{name}"


def _names_in(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:  # none, circular links, or a folder without read permission
        return []
