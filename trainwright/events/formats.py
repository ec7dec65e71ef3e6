"""Names of the files that a run writes beside its log and its checkpoints, and the form of those that it reads again.

Does not import torch: programs that look at many runs use it.
"""

import csv
import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from trainwright.checkpoint.files import open_regular, read_regular

METRICS_NAME = "metrics.json"
CSV_NAME = "metrics.csv"  # of the Python API
LOSSES_NAME = "losses.csv"
CURVES_NAME = "curves.png"
HARDEST_NAME = "hardest_samples.csv"
RECORD_NAME = "run.json"
_TAIL_BYTES = 1 << 18


def read_starts(path: Path) -> list[dict[str, Any]]:
    """The starts of a run as ``RunRecord`` wrote them, oldest first; empty without such a file."""
    with suppress(OSError, ValueError, RecursionError, KeyError, TypeError):
        return [start for start in json.loads(read_regular(path))["starts"] if _is_start(start)]
    return []


def _is_start(start: Any) -> bool:
    """Whether what others compute with has the form that a run writes; not where a file was changed by hand."""
    with suppress(TypeError, ValueError, AttributeError):
        datetime.fromisoformat(start.get("started", "2000-01-01"))
        return bool(sum(start.get("phases", {}).values()) + start.get("seconds", 0) >= 0)
    return False


def row_of(line: str | bytes) -> dict[str, Any] | None:
    """A row of a ``metrics.json``; None for a line that is incomplete or no such row."""
    with suppress(ValueError, RecursionError):  # RecursionError: the line is nested too deeply for a row
        row = json.loads(line)
        if isinstance(row, dict) and type(row.get("iteration")) is int:
            return row
    return None


def rows_of(lines: Iterable[str | bytes]) -> Iterator[dict[str, Any]]:
    """The complete rows of a ``metrics.json``."""
    return (row for line in lines if (row := row_of(line)) is not None)


def read_tail(path: Path, num_bytes: int = _TAIL_BYTES) -> str:
    """The end of a text file; empty without it."""
    try:
        with open(open_regular(path), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - num_bytes))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def read_hardest(path: Path) -> list[dict[str, str]]:
    """The complete rows of a ``hardest_samples.csv``; empty without such a file."""
    try:
        with open(open_regular(path), encoding="utf-8", errors="replace", newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, csv.Error):
        return []
    return [
        row for row in rows if str(row.get("iteration")).isdecimal() and None not in row and None not in row.values()
    ]


def is_number(value: Any) -> bool:
    """Whether this is a number that a float can hold, neither NaN nor infinite."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
