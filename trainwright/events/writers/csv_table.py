"""Metrics as a table: one row per iteration, one column per metric, columns added as new metrics appear."""

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
    """Append the new metrics as rows of a CSV file; the first column is ``iteration``, an absent value an empty cell.

    A metric that appears later adds a column: the file is then written anew beside and renamed. Earlier rows are
    treated as ``JSONWriter`` does: cut on resume, kept beside as ``….old`` when a run starts at 0.
    """

    def __init__(self, csv_file: str | os.PathLike[str], window_size: int = 20) -> None:
        self._file = RowFile(Path(csv_file))
        self._window_size = window_size
        self._columns: list[str] = []
        self._last_written = -1
        self._storage: EventStorage | None = None  # whose rows the file is ready for
        self._gathered: list[Cells] = []  # rows for the file

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
            columns, old = self._read() if self._columns else (["iteration"], [])
            self._rewrite([*columns, *new_columns], old)
        self._file.append(_encode([[row.get(column, "") for column in self._columns] for row in self._gathered]))
        self._gathered = []

    def sync(self) -> None:
        self._file.sync()

    def close(self) -> None:
        self._file.close()

    def _make_ready(self, first: int, *, is_new_run: bool) -> int:
        """Leave in the file only whole rows before iteration ``first``; return the last one among them, or -1."""
        self._file.close()
        self._columns = []
        if not self._file.has_content():
            return -1
        columns, rows = self._read()
        if is_new_run or columns[:1] != ["iteration"]:
            logger.info("%s: the rows of an earlier run are kept in %s.", self._file.path, self._file.keep_beside())
            return -1
        kept = {
            at: row for row in rows if (at := int(row["iteration"])) < first
        }  # of two rows of one iteration, the later
        self._rewrite(columns, [kept[at] for at in sorted(kept)])
        return max(kept, default=-1)

    def _rewrite(self, columns: list[str], rows: list[Cells]) -> None:
        self._file.replace(_encode([columns, *([row.get(column, "") for column in columns] for row in rows)]))
        self._columns = columns

    def _read(self) -> tuple[list[str], list[Cells]]:
        """Columns and whole rows. A last line without its line end may lack digits, so it counts as torn."""
        text = self._file.path.read_bytes().decode(errors="replace")
        whole = text[: text.rfind("\n") + 1]
        try:
            columns, *rows = [*csv.reader(io.StringIO(whole, newline=""))] or [[]]
        except csv.Error:  # a field that is too long to be one of ours
            return [], []
        whole_rows = [row for row in rows if row and len(row) == len(columns) and _ITERATION.fullmatch(row[0])]
        return columns, [dict(zip(columns, row, strict=True)) for row in whole_rows]


def _encode(lines: list[list[str]]) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue().encode()
