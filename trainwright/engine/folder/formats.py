"""Names of the files that a run writes beside its log and its checkpoints, and the form of those that it reads again.

Does not import torch: programs that look at many runs use it.
"""

import csv
import json
import sys
from collections.abc import Mapping
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


def read_starts(path: Path) -> list[dict[str, Any]]:
    """The starts of a run, oldest first; empty without such a file. Values that no run writes are left out."""
    with suppress(OSError, ValueError, RecursionError, KeyError, TypeError):
        starts = json.loads(read_regular(path))["starts"]
        return [_valid(start, _START) for start in starts if isinstance(start, dict)]
    return []


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


def _valid(value: Mapping[str, Any], form: Mapping[str, Any]) -> dict[str, Any]:
    """The entries that have their form: that of their name, or of ``"*"``; all entries without either."""
    found: dict[str, Any] = {}
    for name, one in value.items():
        wanted = form.get(name, form.get("*"))
        if isinstance(wanted, Mapping):
            if isinstance(one, dict) and (name not in _COMPLETE or wanted.keys() <= _valid(one, wanted).keys()):
                found[name] = _valid(one, wanted)
        elif wanted is None or wanted(one):
            found[name] = one
    return found


def is_number(value: Any) -> bool:
    """Whether this is a number that a float can hold, neither NaN nor infinite."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _is_positive(value: Any) -> bool:  # below the largest duration that Python can show
    return is_number(value) and 0 <= value < 1e13


def is_count(value: Any) -> bool:
    """Whether this is a number of iterations, samples or bytes."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_moment(value: Any) -> bool:
    with suppress(TypeError, ValueError, OverflowError):
        return datetime.fromisoformat(value).year > 1970
    return False


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _are_devices(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, dict) and _is_text(one.get("name")) for one in value)


_COUNTS = ("first_iteration", "last_iteration", "iterations_done", "samples_per_iteration", "peak_memory_bytes")
_TEXTS = ("status", "trainer", "api", "device", "command", "working_folder")
_COMPLETE = ("best", "model")  # have all entries of their form, or are left out
_START: dict[str, Any] = {
    **dict.fromkeys(_COUNTS, is_count),
    **dict.fromkeys(_TEXTS, _is_text),
    "started": _is_moment,
    "ended": _is_moment,
    "seconds": _is_positive,
    "iterations_per_epoch": _is_positive,
    "best": {"metric": _is_text, "value": is_number, "iteration": is_count},
    "model": {"class": _is_text, "parameters": is_count},
    "git": {"commit": _is_text, "changed": _are_texts, "num_changed": is_count},
    "machine": {"memory_bytes": is_count, "accelerators": _are_devices},
    "data": {"*": {}},
    "phases": {"*": _is_positive},
    "versions": {},
    "numerics": {},
}
