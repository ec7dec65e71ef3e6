"""Metrics as a CSV table: one row per iteration, one column per metric, added when the metric first appears."""

import csv
import io
import os
import re

from trainwright.events.writers.rows import Row, RowWriter

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


def _encode(lines: list[list[str]]) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue().encode()
