"""``metrics.json``: one strict JSON object per line, each iteration once over any number of resumes."""

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
    """Append the new metrics as JSON lines: keys sorted, ``iteration`` among them, NaN and inf as null.

    The file is touched at the first write. If the run is resumed, rows of iterations that it is about to repeat, and a
    line torn by a crash, are cut then; if the run starts at 0, an earlier run's file is kept beside as ``….old``.
    """

    def __init__(self, json_file: str | os.PathLike[str], window_size: int = 20) -> None:
        self._file = RowFile(Path(json_file))
        self._window_size = window_size
        self._last_written = -1
        self._storage: EventStorage | None = None  # whose rows the file is ready for
        self._gathered: list[str] = []  # lines for the file

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
        """Leave in the file only whole rows before iteration ``first``; return the last one among them, or -1."""
        self._file.close()
        if not self._file.has_content():
            return -1
        if is_new_run:
            logger.info("%s: the rows of an earlier run are kept in %s.", self._file.path, self._file.keep_beside())
            return -1
        old = self._file.path.read_bytes()
        lines = old.splitlines()
        rows = [(iteration, line) for line in lines if (iteration := _iteration(line)) is not None]
        # Of two rows of one iteration the later one, as sorting is stable.
        kept = {iteration: line for iteration, line in sorted(rows, key=itemgetter(0)) if iteration < first}
        num_again = sum(iteration >= first for iteration, _ in rows)
        num_doubled = len(rows) - num_again - len(kept)
        new = b"".join(line + b"\n" for line in kept.values())
        if new != old:
            self._file.replace(new)
            logger.info(
                "%s: cut %d rows that iteration %d and later will write again, %d rows of iterations that had another,"
                " %d lines that are no complete rows.",
                self._file.path, num_again, first + 1, num_doubled, len(lines) - len(rows),
            )  # fmt: skip
        return max(kept, default=-1)


def _line(iteration: int, row: Row) -> str:
    finite: dict[str, float | None] = {name: value if math.isfinite(value) else None for name, value in row.items()}
    return json.dumps({**finite, "iteration": iteration}, sort_keys=True, allow_nan=False) + "\n"


def _iteration(line: bytes) -> int | None:
    """The iteration of a row; None for a line that is torn or no row of ours."""
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError):  # the second: a line that nests too deep to be one of ours
        return None
    iteration = row.get("iteration") if isinstance(row, dict) else None
    return iteration if type(iteration) is int else None
