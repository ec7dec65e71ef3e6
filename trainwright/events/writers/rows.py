"""Rows of a metrics file: new ones are appended whole, old ones are cut on resume by writing beside and renaming."""

import logging
import os
from contextlib import suppress
from pathlib import Path

from trainwright.checkpoint.files import atomic_write, irregular, open_regular, remove_stale, sync_folder
from trainwright.events.storage import EventStorage

logger = logging.getLogger("trainwright.events")

Row = dict[str, float]


def rows_after(storage: EventStorage, iteration: int, window_size: int) -> dict[int, Row]:
    """Newest values put after ``iteration``, noisy ones smoothed: one row per iteration they belong to, in order."""
    rows: dict[int, Row] = {}
    for name, (value, at) in storage.latest_with_smoothing_hint(window_size).items():
        if at > iteration:
            rows.setdefault(at, {})[name] = value
    return dict(sorted(rows.items()))


class RowFile:
    """A file that grows by whole blocks: a block is there or not at all, and after ``sync`` it is on the disk.

    Where something else has its name or that of its folder, such as a pipe, nothing is written: one warning.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None
        self._is_synced = True
        self._is_left_out = False

    def append(self, block: bytes) -> None:
        """Write. When that fails, a full disk for one, the file is cut back to what it was."""
        if self._descriptor is None:
            if not self.is_possible():
                return
            self.path.parent.mkdir(parents=True, exist_ok=True)
            remove_stale(self.path.parent)  # what a killed process had begun to write beside
            self._descriptor = open_regular(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            sync_folder(self.path.parent)
        size = os.fstat(self._descriptor).st_size
        try:
            self._is_synced = False
            _write_all(self._descriptor, block)
        except OSError:
            with suppress(OSError):  # what it said first counts
                os.ftruncate(self._descriptor, size)
            raise

    def sync(self) -> None:
        """Return when all blocks are on the disk."""
        if self._descriptor is not None and not self._is_synced:
            os.fsync(self._descriptor)
            self._is_synced = True

    def replace(self, content: bytes) -> None:
        """Put new content in place of the file: at every moment the path holds all of the old or all of the new."""
        self.close()
        if self.is_possible():  # a rename would put a file in the place of a device
            self.path.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(self.path, content)

    def is_possible(self) -> bool:
        """Whether a file can be there. Where something else is in its place, a warning says so once."""
        if not self._is_left_out:
            self._is_left_out = is_left_out(self.path)
        return not self._is_left_out

    def keep_beside(self) -> Path:
        """Rename the file to ``name.old``, or ``name.old.1``, … where that is taken, and return the new path."""
        kept = self.path.with_name(f"{self.path.name}.old")
        number = 0
        while kept.exists():
            number += 1
            kept = self.path.with_name(f"{self.path.name}.old.{number}")
        self.path.rename(kept)
        sync_folder(self.path.parent)
        return kept

    def has_content(self) -> bool:
        """Whether an earlier run has left anything there."""
        return self.path.is_file() and self.path.stat().st_size > 0

    def close(self) -> None:
        """Sync and close the file; the next ``append`` opens it again."""
        if self._descriptor is not None:
            try:
                self.sync()
            finally:
                os.close(self._descriptor)
                self._descriptor = None


def is_left_out(path: Path) -> bool:
    """Whether a file cannot be there, since its name or that of its folder is that of something else; a warning."""
    folders = [folder for folder in path.parents if os.path.lexists(folder) and not folder.is_dir()]
    kinds = {folder: irregular(folder) or "no folder" for folder in folders} | {path: irregular(path)}
    place, kind = next(((place, kind) for place, kind in kinds.items() if kind is not None), (None, None))
    if kind is not None:
        logger.warning("%s: not written, since %s is %s; the run goes on without it.", path, place, kind)
    return kind is not None


def _write_all(descriptor: int, block: bytes) -> None:
    while block:  # the system may take less than all at once
        block = block[os.write(descriptor, block) :]
