"""``metrics.json``: one strict JSON object per line and one line per iteration, after any number of resumes."""

import json
import logging
import math
import os
from operator import itemgetter
from pathlib import Path
from typing import Any

from trainwright.events.storage import EventStorage
from trainwright.events.writers.base import FileWriter
from trainwright.events.writers.rows import Row, RowFile, rows_after

logger = logging.getLogger("trainwright.events")


class JSONWriter(FileWriter):
    """Append new metrics as JSON lines: sorted keys, including ``iteration``; NaN and inf are null.

    The file is opened at the first write. A resumed run then removes the rows of iterations that it repeats, and a
    line that a crash left incomplete; a run that starts at 0 renames the file of an earlier run to ``….old``.
    """

    def __init__(self, json_file: str | os.PathLike[str], window_size: int = 20) -> None:
        self._file = RowFile(Path(json_file))
        self._window_size = window_size
        self._last_written = -1
        self._storage: EventStorage | None = None  # the storage that the file was prepared for
        self._gathered: list[str] = []  # lines to write

    def __repr__(self) -> str:
        return f"JSONWriter({str(self._file.path)!r}, window_size={self._window_size})"

    def gather(self, storage: EventStorage) -> None:
        if storage is not self._storage:
            if not storage.latest():
                return
            self._last_written = self._make_ready(storage.first_unwritten, is_new_run=storage.start_iter == 0)
            self._storage = storage
        rows = rows_after(storage, self._last_written, self._window_size)
        if rows:
            self._gathered += [_line(iteration, row) for iteration, row in rows.items()]
            self._last_written = max(rows)

    def flush(self) -> None:
        if self._gathered:
            self._file.append("".join(self._gathered).encode())
            self._gathered = []

    def sync(self) -> None:
        self._file.sync()

    def close(self) -> None:
        self._file.close()

    def _make_ready(self, first: int, *, is_new_run: bool) -> int:
        """Keep only complete rows before iteration ``first`` in the file; return the last kept iteration, or -1."""
        self._file.close()
        if not self._file.has_content():
            return -1
        if is_new_run:
            logger.info("%s: renamed the file of an earlier run to %s.", self._file.path, self._file.rename_to_backup())
            return -1
        content = self._file.path.read_bytes()
        lines = content.splitlines()
        rows = [(iteration, line) for line in lines if (iteration := _iteration(line)) is not None]
        # Of two rows of one iteration, this keeps the later one: sorting is stable.
        kept = {iteration: line for iteration, line in sorted(rows, key=itemgetter(0)) if iteration < first}
        num_again = sum(iteration >= first for iteration, _ in rows)
        num_duplicates = len(rows) - num_again - len(kept)
        new_content = b"".join(line + b"\n" for line in kept.values())
        if new_content != content:
            self._file.replace(new_content)
            counts = [
                (num_again, "row", f" from iteration {first + 1} on, to be written again"),
                (num_duplicates, "duplicate row", ""),
                (len(lines) - len(rows), "incomplete line", ""),
            ]
            removed = ", ".join(f"{n} {what}{'s' * (n > 1)}{more}" for n, what, more in counts if n)
            if removed:  # else the lines were only in another order
                logger.info("%s: removed %s.", self._file.path, removed)
        return max(kept, default=-1)


def _line(iteration: int, row: Row) -> str:
    finite: dict[str, float | None] = {name: value if math.isfinite(value) else None for name, value in row.items()}
    return json.dumps({**finite, "iteration": iteration}, sort_keys=True, allow_nan=False) + "\n"


def _iteration(line: bytes) -> int | None:
    """The iteration of a row; None for a line that is incomplete or not a row of this writer."""
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError):  # RecursionError: the line is nested too deeply for a row
        return None
    iteration = row.get("iteration") if isinstance(row, dict) else None
    return iteration if type(iteration) is int else None
