"""Rows of a metrics file: new ones are appended whole, old ones are cut on resume by writing beside and renaming."""

import errno
import os
from contextlib import suppress
from pathlib import Path

from trainwright.checkpoint.files import atomic_write, remove_stale, sync_folder
from trainwright.events.storage import EventStorage

Row = dict[str, float]


def rows_after(storage: EventStorage, iteration: int, window_size: int) -> dict[int, Row]:
    """Newest values put after ``iteration``, noisy ones smoothed: one row per iteration they belong to, in order."""
    rows: dict[int, Row] = {}
    for name, (value, at) in storage.latest_with_smoothing_hint(window_size).items():
        if at > iteration:
            rows.setdefault(at, {})[name] = value
    return dict(sorted(rows.items()))


class RowFile:
    """A file that grows by whole blocks: a block is there or not at all, and after ``sync`` it is on the disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None
        self._is_synced = True

    def append(self, block: bytes) -> None:
        """Write. When that fails, a full disk for one, the file is cut back to what it was."""
        if self._descriptor is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            remove_stale(self.path.parent)  # what a killed process had begun to write beside
            self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            sync_folder(self.path.parent)
        size = os.fstat(self._descriptor).st_size
        try:
            self._is_synced = False
            _write_all(self._descriptor, block)
        except OSError:
            with suppress(OSError):  # a device has no length: what it said first counts
                os.ftruncate(self._descriptor, size)
            raise

    def sync(self) -> None:
        """Return when all blocks are on the disk."""
        if self._descriptor is not None and not self._is_synced:
            os.fsync(self._descriptor)
            self._is_synced = True

    def replace(self, content: bytes) -> None:
        """Put new content in place of the file: at every moment the path holds all of the old or all of the new."""
        if self.path.exists() and not self.path.is_file():  # a rename would put a file in the place of a device
            raise OSError(errno.EINVAL, "metrics go into a regular file, and this is none", str(self.path))
        self.close()
        atomic_write(self.path, content)

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


def _write_all(descriptor: int, block: bytes) -> None:
    while block:  # the system may take less than all at once
        block = block[os.write(descriptor, block) :]
