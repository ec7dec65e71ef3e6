"""Metrics as a CSV table: one row per iteration, one column per metric, added when the metric first appears."""

import csv
import io
import logging
import os
import re
from pathlib import Path

from trainwright.events.storage import EventStorage
from trainwright.events.writers.base import FileWriter
from trainwright.events.writers.rows import RowFile, rows_after

logger = logging.getLogger("trainwright.events")

_ITERATION = re.compile(r"[0-9]{1,18}")
Cells = dict[str, str]


class CSVWriter(FileWriter):
    """Append new metrics as rows of a CSV file; the first column is ``iteration``, a missing value is an empty cell.

    A metric that appears later adds a column: the file is then replaced atomically. Rows of an earlier run are handled
    as in ``JSONWriter``: removed on resume from the resumed iteration on, renamed to ``….old`` if a run starts at 0.
    """

    def __init__(self, csv_file: str | os.PathLike[str], window_size: int = 20) -> None:
        self._file = RowFile(Path(csv_file))
        self._window_size = window_size
        self._columns: list[str] = []
        self._last_written = -1
        self._storage: EventStorage | None = None  # the storage that the file was prepared for
        self._gathered: list[Cells] = []  # rows to write

    def __repr__(self) -> str:
        return f"CSVWriter({str(self._file.path)!r}, window_size={self._window_size})"

    def gather(self, storage: EventStorage) -> None:
        if storage is not self._storage:
            if not storage.latest():
                return
            self._last_written = self._make_ready(storage.first_unwritten, is_new_run=storage.start_iter == 0)
            self._storage = storage
        rows = rows_after(storage, self._last_written, self._window_size)
        if rows:
            self._gathered += [
                {"iteration": str(iteration), **{name: repr(value) for name, value in row.items()}}
                for iteration, row in rows.items()
            ]
            self._last_written = max(rows)

    def flush(self) -> None:
        if not self._gathered:
            return
        new_columns = sorted({name for row in self._gathered for name in row} - {"iteration", *self._columns})
        if new_columns:
            columns, rows = self._read() if self._columns else (["iteration"], [])
            self._rewrite([*columns, *new_columns], rows)
        self._file.append(_encode([[row.get(column, "") for column in self._columns] for row in self._gathered]))
        self._gathered = []

    def sync(self) -> None:
        self._file.sync()

    def close(self) -> None:
        self._file.close()

    def _make_ready(self, first: int, *, is_new_run: bool) -> int:
        """Keep only complete rows before iteration ``first`` in the file; return the last kept iteration, or -1."""
        self._file.close()
        self._columns = []
        if not self._file.has_content():
            return -1
        columns, rows = self._read()
        if is_new_run or columns[:1] != ["iteration"]:
            logger.info("%s: renamed the file of an earlier run to %s.", self._file.path, self._file.rename_to_backup())
            return -1
        kept = {
            at: row for row in rows if (at := int(row["iteration"])) < first
        }  # of two rows of one iteration, the later one
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


def _encode(lines: list[list[str]]) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue().encode()
