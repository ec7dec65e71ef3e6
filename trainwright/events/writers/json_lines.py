"""``metrics.json``: one strict JSON object per line and one line per iteration, after any number of resumes."""

import json
import logging
import math
import os
from operator import itemgetter
from typing import Any

from trainwright.events.writers.rows import Row, RowWriter

logger = logging.getLogger("trainwright.events")


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
