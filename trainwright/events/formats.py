"""Names of the files that a run writes beside its log and its checkpoints, and the form of those that it reads again.

Does not import torch: programs that look at many runs use it.
"""

import csv
import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from trainwright.base.errors import ConfigError
from trainwright.base.files import open_regular, read_regular

METRICS_NAME = "metrics.json"
CSV_NAME = "metrics.csv"  # of the Python API
LOSSES_NAME = "losses.csv"
CURVES_NAME = "curves.png"
HARDEST_NAME = "hardest_samples.csv"
HARDEST_COLUMNS = ("iteration", "dataset", "sample", "name", "loss", "label", "prediction")
RECORD_NAME = "run.json"
FORMATS = {RECORD_NAME: 1, METRICS_NAME: 1}  # the numbers of their formats; docs/formats.md says what is read
_TAIL_BYTES = 1 << 18


def read_starts(path: Path) -> list[dict[str, Any]]:
    """The starts of a run as ``RunRecord`` wrote them, oldest first; empty without such a file."""
    with suppress(OSError, ValueError, RecursionError, KeyError, TypeError):
        return [start for start in json.loads(read_regular(path))["starts"] if _is_start(start)]
    return []


def check_formats(path: Path) -> None:
    """Check the numbers in a ``run.json``. A missing or damaged file has none.

    Raises:
        ConfigError: a newer version has written it, or the metrics beside it.
    """
    numbers: Any = {}
    with suppress(OSError, ValueError, RecursionError, KeyError, TypeError):
        numbers = json.loads(read_regular(path))["formats"]
    for name, known in FORMATS.items():
        found = numbers.get(name) if isinstance(numbers, dict) else None
        if isinstance(found, int) and found > known:
            raise ConfigError(
                f"{path}: {name} has format {found}; this version of trainwright reads {known}. A newer version has"
                " written it: update trainwright, or start a new run with the weights alone."
            )


def _is_start(start: Any) -> bool:
    """Whether it has the form that a run writes. A file that was changed by hand must not end a table of runs."""
    with suppress(TypeError, ValueError):
        return _has_form(start, _START) and datetime.fromisoformat(start.get("started") or "2000-01-01").year > 1970
    return False


# What is read of a start. A tuple: it may be missing; ``"*"``: all entries.
_START: dict[str, Any] = {
    **dict.fromkeys(("started", "ended", "status", "reason", "device", "command", "working_folder"), ("",)),
    **dict.fromkeys(("seconds", "iterations_per_epoch"), (0.0,)),
    **dict.fromkeys(("first_iteration", "last_iteration", "iterations_done", "processes"), (0,)),
    **dict.fromkeys(("samples_per_iteration", "peak_memory_bytes"), (0,)),
    **dict.fromkeys(("versions", "numerics"), ({},)),
    "best": ({"metric": "", "value": 0.0, "iteration": 0},),
    "model": ({"class": "", "parameters": 0},),
    "data": ({"*": {}},),
    "phases": ({"*": 0.0},),
    "evaluated": ([""],),
    "git": ({"commit": ("",), "num_changed": (0,), "changed": ([""],)},),
    "machine": ({"memory_bytes": (0,), "accelerators": ([{"name": ""}],)},),
}


def _has_form(value: Any, form: Any) -> bool:
    if isinstance(form, tuple):
        return value is None or _has_form(value, form[0])
    if isinstance(form, list):
        return isinstance(value, list) and all(_has_form(one, form[0]) for one in value)
    if isinstance(form, dict):
        forms = dict.fromkeys(value, form["*"]) if "*" in form else form
        return isinstance(value, dict) and all(_has_form(value.get(name), one) for name, one in forms.items())
    if isinstance(form, int):
        return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62
    return is_number(value) if isinstance(form, float) else isinstance(value, str)


def parse_row(line: str | bytes) -> dict[str, Any] | None:
    """A row of a ``metrics.json``; None for a line that is incomplete or no such row."""
    with suppress(ValueError, RecursionError):  # RecursionError: the line is nested too deeply for a row
        row = json.loads(line)
        if isinstance(row, dict) and type(row.get("iteration")) is int:
            return row
    return None


def parse_rows(lines: Iterable[str | bytes]) -> Iterator[dict[str, Any]]:
    """The complete rows of a ``metrics.json``."""
    return (row for line in lines if (row := parse_row(line)) is not None)


def read_tail(path: Path, num_bytes: int = _TAIL_BYTES) -> str:
    """The end of a text file; empty without it."""
    try:
        with open(open_regular(path), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - num_bytes))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def read_hardest(path: Path) -> list[dict[str, str]]:
    """The complete rows of a ``hardest_samples.csv``; empty without such a file, or if it has other columns."""
    try:
        with open(open_regular(path), encoding="utf-8", errors="replace", newline="") as file:
            reader = csv.DictReader(file)
            with cells_up_to(os.fstat(file.fileno()).st_size):  # a name, or a text that was generated
                rows = list(reader)
    except (OSError, csv.Error):
        return []
    if tuple(reader.fieldnames or ()) != HARDEST_COLUMNS:
        return []
    return [row for row in rows if row["iteration"].isdecimal() and None not in row and None not in row.values()]


@contextmanager
def cells_up_to(length: int) -> Iterator[None]:
    """Readers of CSV take cells of so many characters. The limit is that of the process, 131,072 by default."""
    before = csv.field_size_limit()
    csv.field_size_limit(max(before, length))
    try:
        yield
    finally:
        csv.field_size_limit(before)


def is_number(value: Any) -> bool:
    """Whether this is a number that a float can hold, neither NaN nor infinite."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
