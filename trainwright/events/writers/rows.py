"""Files with one row per iteration: appended in complete blocks; on resume the rows to be repeated are removed."""

import atexit
import csv
import io
import json
import logging
import math
import os
import re
from abc import abstractmethod
from collections.abc import Callable
from contextlib import suppress
from operator import itemgetter
from pathlib import Path

from trainwright.base.files import (
    atomic_write,
    is_at,
    make_folders,
    named,
    open_regular,
    remove_stale,
    sync_file,
    sync_folder,
)
from trainwright.events.formats import parse_row, parse_rows
from trainwright.events.storage import EventStorage
from trainwright.events.writers.base import FileWriter

logger = logging.getLogger("trainwright.events")
Row = dict[str, float]
LOSS = "total_loss"  # the metric that both APIs record in each iteration

open_files: dict[Path, Callable[[], object]] = {}  # that writers append to, with what waits for rows in the background
_synced: dict[Path, tuple[int, ...]] = {}  # their inode, size and time, as they are on the disk


@atexit.register
def sync_files() -> None:
    """Wait until every row of a file is on disk. A file that cannot be synced is logged.

    A checkpoint records which rows are written, so these rows must be on disk before the checkpoint is committed.
    """
    for path, wait in list(open_files.items()):
        try:
            wait()
            with suppress(FileNotFoundError):  # deleted or moved during the run
                status = os.stat(path)
                version = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
                if _synced.get(path) != version:  # two checkpoints of one iteration have the same rows
                    sync_file(path)
                    _synced[path] = version
        except OSError as error:
            logger.warning("%s: its rows may be lost if the machine fails: %s", path, error)


def rows_after(storage: EventStorage, iteration: int, window_size: int = 20) -> dict[int, Row]:
    """The newest values later than ``iteration``, noisy ones smoothed: one row per iteration, in order."""
    rows: dict[int, Row] = {}
    for name, (value, at) in storage.latest_with_smoothing_hint(window_size).items():
        if at > iteration:
            rows.setdefault(at, {})[name] = value
    return dict(sorted(rows.items()))


class RowWriter(FileWriter):
    def __init__(self, path: str | os.PathLike[str], window_size: int) -> None:
        self._file = RowFile(Path(path).absolute())
        self._window_size = window_size
        self._last_written = -1
        self._storage: EventStorage | None = None  # the storage that the file was prepared for
        self._unwritten: list[tuple[int, Row]] = []  # kept if a write fails, as on a full disk, for the next one

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self._file.path)!r}, window_size={self._window_size})"

    def append(self, storage: EventStorage) -> None:
        if storage is not self._storage:
            if not storage.latest():
                return
            self._file.close()
            is_there = self._file.has_content()
            self._last_written = self._prepare(storage.first_unwritten, is_new_run=storage.start_iter == 0)
            if is_there and storage.last_row is not None and storage.start_iter > 0:
                self._warn_of_lost(storage.last_row)
            self._storage = storage
        rows = self._rows_after(storage, self._last_written)
        self._unwritten += rows.items()
        self._last_written = max(rows, default=self._last_written)
        if self._unwritten:
            self._file.close_if_lost()
            self._append(self._unwritten)
            self._unwritten = []

    def close(self) -> None:
        self._file.close()

    def _warn_of_lost(self, last_row: int) -> None:
        """Warn if the file ends before the row ``last_row``, which was on disk when the checkpoint was saved."""
        if (last := self._last_written) < last_row:
            logger.warning(
                "%s: has no rows of the iterations %d to %d, which the run wrote before its checkpoint. They are lost:"
                " was the file cut or edited?",
                self._file.path,
                last + 2,
                last_row + 1,
            )

    def _prepare(self, first: int, *, is_new_run: bool) -> int:
        """Keep only complete rows before iteration ``first`` in the file; return the last kept iteration, or -1."""
        if not self._file.has_content():
            return -1
        last = None if is_new_run else self._keep_before(first)
        if last is None:
            logger.info("%s: renamed the file of an earlier run to %s.", self._file.path, self._file.rename_to_backup())
        return -1 if last is None else last

    def _rows_after(self, storage: EventStorage, iteration: int) -> dict[int, Row]:
        return rows_after(storage, iteration, self._window_size)

    @abstractmethod
    def _append(self, rows: list[tuple[int, Row]]) -> None:
        """Append rows to the file as one block."""

    @abstractmethod
    def _keep_before(self, first: int) -> int | None:
        """As ``_prepare``, for a file with content; None if it is not a file of this writer."""


class RowFile:
    """A file that grows by complete blocks, each written completely or not at all; `sync_files` gets them on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    def append(self, block: bytes) -> None:
        """Write a block. If that fails, for example on a full disk, truncate the file to its previous size."""
        if self._descriptor is None:
            make_folders(self.path.parent)
            remove_stale(self.path.parent)  # temporary files of a killed process
            self._descriptor = open_regular(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            open_files[self.path] = lambda: None
            sync_folder(self.path.parent)
        size = os.fstat(self._descriptor).st_size
        try:
            while block:  # os.write may write only a part
                block = block[os.write(self._descriptor, block) :]
        except BaseException as error:  # a second Ctrl-C, too: the block is written again at the end
            with suppress(OSError):  # the first error is raised
                os.ftruncate(self._descriptor, size)
            if isinstance(error, OSError):
                raise named(error, self.path) from None
            raise

    def close_if_lost(self) -> None:
        """Close the file and warn if it is no longer at its path; the next block makes it again."""
        if self._descriptor is not None and not is_at(self._descriptor, self.path):
            logger.warning("%s: deleted or moved during the run; it is made again, without the rows so far.", self.path)
            self.close()

    def replace(self, content: bytes) -> None:
        """Replace the content atomically: the path always holds the complete previous or the complete new content."""
        self.close()
        make_folders(self.path.parent)
        atomic_write(self.path, content)

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
        return self.path.is_file() and self.path.stat().st_size > 0

    def close(self) -> None:
        """Sync and close the file; the next ``append`` opens it again."""
        if self._descriptor is not None:
            try:
                os.fsync(self._descriptor)
            finally:
                open_files.pop(self.path, None)
                os.close(self._descriptor)
                self._descriptor = None


class JSONWriter(RowWriter):
    """Append new metrics as JSON lines: sorted keys, including ``iteration``; NaN and inf are null.

    The file is opened at the first write. A resumed run then removes the rows of iterations that it repeats, and a
    line that a crash left incomplete; a run that starts at 0 renames the file of an earlier run to ``….old``.
    """

    def __init__(self, json_file: str | os.PathLike[str], window_size: int = 20) -> None:
        super().__init__(json_file, window_size)

    def _append(self, rows: list[tuple[int, Row]]) -> None:
        self._file.append("".join(_line(iteration, row) for iteration, row in rows).encode())

    def _keep_before(self, first: int) -> int:
        content = self._file.path.read_bytes()
        lines = content.splitlines()
        rows = [(row["iteration"], line) for line in lines if (row := parse_row(line)) is not None]
        # Of two rows of one iteration, this keeps the later one: sorting is stable.
        kept = {iteration: line for iteration, line in sorted(rows, key=itemgetter(0)) if iteration < first}
        again = [iteration + 1 for iteration, _ in rows if iteration >= first]
        num_duplicates = len(rows) - len(again) - len(kept)
        new_content = b"".join(line + b"\n" for line in kept.values())
        if new_content != content:
            self._file.replace(new_content)
            counts = [
                (len(again), "row", f" from iteration {min(again, default=0)} on, to be written again"),
                (num_duplicates, "duplicate row", ""),
                (len(lines) - len(rows), "incomplete line", ""),
            ]
            removed = ", ".join(f"{n} {what}{'s' * (n > 1)}{more}" for n, what, more in counts if n)
            if removed:  # else the lines were only in another order
                logger.info("%s: removed %s.", self._file.path, removed)
        return max(kept, default=-1)


def read_metric_rows(path: Path) -> dict[int, Row]:
    """The complete rows of a file of a JSONWriter in order, without values that are not finite; {}: no such file."""
    rows: dict[int, Row] = {}
    for row in parse_rows(path.read_bytes().splitlines() if path.is_file() else ()):
        iteration = row.pop("iteration")
        rows[iteration] = {name: value for name, value in row.items() if value is not None}
    return dict(sorted(rows.items()))


def _line(iteration: int, row: Row) -> str:
    finite: dict[str, float | None] = {name: value if math.isfinite(value) else None for name, value in row.items()}
    return json.dumps({**finite, "iteration": iteration}, sort_keys=True, allow_nan=False) + "\n"


_ITERATION = re.compile(r"[0-9]{1,18}")
Cells = dict[str, str]


class CSVWriter(RowWriter):
    """Append new metrics as rows of a CSV file; the first column is ``iteration``, a missing value is an empty cell.

    A metric that appears later adds a column: the file is then replaced atomically. Rows of an earlier run are handled
    as in ``JSONWriter``: removed on resume from the resumed iteration on, renamed to ``….old`` if a run starts at 0.
    """

    def __init__(self, csv_file: str | os.PathLike[str], window_size: int = 20) -> None:
        super().__init__(csv_file, window_size)
        self._columns: list[str] = []

    def _append(self, rows: list[tuple[int, Row]]) -> None:
        if not self._file.has_content():
            self._columns = []
        cells = [{"iteration": str(at), **{name: repr(value) for name, value in row.items()}} for at, row in rows]
        new_columns = sorted({name for row in cells for name in row} - {"iteration", *self._columns})
        if new_columns:
            columns, known_rows = self._read() if self._columns else (["iteration"], [])
            self._rewrite([*columns, *new_columns], known_rows)
        self._file.append(_encode([[row.get(column, "") for column in self._columns] for row in cells]))

    def _prepare(self, first: int, *, is_new_run: bool) -> int:
        self._columns = []
        return super()._prepare(first, is_new_run=is_new_run)

    def _keep_before(self, first: int) -> int | None:
        columns, rows = self._read()
        if columns[:1] != ["iteration"]:
            return None
        # Of two rows of one iteration, this keeps the later one.
        kept = {at: row for row in rows if (at := int(row["iteration"])) < first}
        self._rewrite(columns, [kept[at] for at in sorted(kept)])
        return max(kept, default=-1)

    def _rewrite(self, columns: list[str], rows: list[Cells]) -> None:
        self._file.replace(_encode([columns, *([row.get(column, "") for column in columns] for row in rows)]))
        self._columns = columns

    def _read(self) -> tuple[list[str], list[Cells]]:
        """Columns and complete rows. A last line without a newline may lack digits, so it counts as incomplete."""
        text = self._file.path.read_bytes().decode(errors="replace")
        complete = text[: text.rfind("\n") + 1]
        try:
            columns, *rows = [*csv.reader(io.StringIO(complete, newline=""))] or [[]]
        except csv.Error:  # a field too long for a file of this writer
            return [], []
        complete_rows = [row for row in rows if row and len(row) == len(columns) and _ITERATION.fullmatch(row[0])]
        return columns, [dict(zip(columns, row, strict=True)) for row in complete_rows]


class LossWriter(CSVWriter):
    """Append the training loss of each iteration, unsmoothed and with all its digits: two runs are compared by it."""

    def __init__(self, csv_file: str | os.PathLike[str]) -> None:
        super().__init__(csv_file)

    def __repr__(self) -> str:
        return f"LossWriter({str(self._file.path)!r})"

    def _rows_after(self, storage: EventStorage, iteration: int) -> dict[int, Row]:
        history = storage.histories().get(LOSS)
        values = [] if history is None else history.values_since(iteration + 1)
        return {at: {LOSS: value} for value, at in values}


def _encode(lines: list[list[str]]) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue().encode()
