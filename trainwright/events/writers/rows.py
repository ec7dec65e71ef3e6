"""Rows of a metrics file: appended in complete blocks; on resume the file is replaced atomically to remove rows."""

import logging
import os
from contextlib import suppress
from pathlib import Path

from trainwright.checkpoint.files import atomic_write, irregular, open_regular, remove_stale, sync_folder
from trainwright.events.storage import EventStorage

logger = logging.getLogger("trainwright.events")

Row = dict[str, float]


def rows_after(storage: EventStorage, iteration: int, window_size: int) -> dict[int, Row]:
    """The newest values later than ``iteration``, noisy ones smoothed: one row per iteration, in order."""
    rows: dict[int, Row] = {}
    for name, (value, at) in storage.latest_with_smoothing_hint(window_size).items():
        if at > iteration:
            rows.setdefault(at, {})[name] = value
    return dict(sorted(rows.items()))


class RowFile:
    """A file that grows by complete blocks: each is written completely or not at all, and is on disk after ``sync``.

    If its path or a parent folder is something else, such as a pipe, it writes nothing and warns once.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None
        self._is_synced = True
        self._is_blocked = False

    def append(self, block: bytes) -> None:
        """Write a block. If that fails, for example on a full disk, truncate the file to its previous size."""
        if self._descriptor is None:
            if not self.is_possible():
                return
            self.path.parent.mkdir(parents=True, exist_ok=True)
            remove_stale(self.path.parent)  # temporary files of a killed process
            self._descriptor = open_regular(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            sync_folder(self.path.parent)
        size = os.fstat(self._descriptor).st_size
        try:
            self._is_synced = False
            _write_all(self._descriptor, block)
        except OSError:
            with suppress(OSError):  # the first error is raised
                os.ftruncate(self._descriptor, size)
            raise

    def sync(self) -> None:
        """Wait until all blocks are on disk."""
        if self._descriptor is not None and not self._is_synced:
            os.fsync(self._descriptor)
            self._is_synced = True

    def replace(self, content: bytes) -> None:
        """Replace the content atomically: the path always holds the complete previous or the complete new content."""
        self.close()
        if self.is_possible():  # a rename would replace a device by a file
            self.path.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(self.path, content)

    def is_possible(self) -> bool:
        """Whether a file can be at the path. If something else is there, warn once."""
        if not self._is_blocked:
            self._is_blocked = is_blocked(self.path)
        return not self._is_blocked

    def rename_to_backup(self) -> Path:
        """Rename the file to ``name.old``, or to ``name.old.1``, … if that exists, and return the new path."""
        backup = self.path.with_name(f"{self.path.name}.old")
        number = 0
        while backup.exists():
            number += 1
            backup = self.path.with_name(f"{self.path.name}.old.{number}")
        self.path.rename(backup)
        sync_folder(self.path.parent)
        return backup

    def has_content(self) -> bool:
        """Whether the file exists and is not empty."""
        return self.path.is_file() and self.path.stat().st_size > 0

    def close(self) -> None:
        """Sync and close the file; the next ``append`` opens it again."""
        if self._descriptor is not None:
            try:
                self.sync()
            finally:
                os.close(self._descriptor)
                self._descriptor = None


def is_blocked(path: Path) -> bool:
    """Whether something other than a file is at ``path``, or something other than a folder above it; logs a warning."""
    folders = [folder for folder in path.parents if os.path.lexists(folder) and not folder.is_dir()]
    kinds = {folder: irregular(folder) or "no folder" for folder in folders} | {path: irregular(path)}
    place, kind = next(((place, kind) for place, kind in kinds.items() if kind is not None), (None, None))
    if kind is not None:
        logger.warning("%s: not written, because %s is %s; the run continues without it.", path, place, kind)
    return kind is not None


def _write_all(descriptor: int, block: bytes) -> None:
    while block:  # os.write may write only a part
        block = block[os.write(descriptor, block) :]
