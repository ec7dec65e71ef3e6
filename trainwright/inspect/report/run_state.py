"""``run.json`` as far as it is valid, and the state of its run. Reads small files only, without other packages."""

import json
import logging
import os
import platform
import re
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from trainwright.checkpoint.files import open_regular, read_regular
from trainwright.terminal import printable

logger = logging.getLogger("trainwright.inspect.report")

RECORD_NAME = "run.json"
CONFIGS = ("config.yaml", "training_config.yaml")  # of config files, of the Python API
STATES = ("running", "finished", "interrupted", "failed")
_WRITTEN = ("log.txt", "metrics.json", "losses.csv")  # during a run
_QUIET_S = 600.0  # a run of another machine that has written nothing for so long does not run
_TAIL_BYTES = 1 << 18
_ENDS = re.compile(r"(Finished after iteration|Training failed in|Training was stopped in|Training\n)")


def read_starts(path: Path) -> list[dict[str, Any]]:
    """The starts of a run, oldest first; empty without such a file. Values that no run writes are left out."""
    with suppress(OSError, ValueError, RecursionError, KeyError, TypeError):
        starts = json.loads(read_regular(path))["starts"]
        return [_valid(start, _START) for start in starts if isinstance(start, dict)]
    return []


def read_config(folder: Path) -> dict[str, Any]:
    """The configuration of a run without secrets; empty, with a warning, if it cannot be read."""
    from trainwright.config.errors import ConfigError
    from trainwright.config.secrets import without_secrets
    from trainwright.config.yaml_file import read_mapping

    file = next((folder / name for name in CONFIGS if (folder / name).is_file()), None)
    try:
        return {} if file is None else without_secrets(read_mapping(file))[0]
    except ConfigError as error:
        logger.warning("%s: its settings cannot be read: %s", printable(str(folder)), error)
        return {}


def flat(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested sections by their dotted names, as in overrides; a list of plain values is one value."""
    if isinstance(tree, Mapping) and (tree or not prefix):
        for key, value in tree.items():
            yield from flat(value, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(tree, list) and any(isinstance(item, Mapping) for item in tree):
        yield from flat(dict(enumerate(tree)), prefix)
    else:
        yield prefix, tree


def state_of(folder: Path, starts: list[dict[str, Any]]) -> str:
    """One of `STATES`. A killed run is "interrupted"; one on another machine is running while it writes."""
    last = starts[-1] if starts else {}
    ended = _ENDS.findall(read_tail(folder / "log.txt"))[-1:]
    if is_locked(folder) or ("ended" not in last and ended in ([], ["Training\n"]) and _writes_elsewhere(folder, last)):
        return "running"
    if last.get("status") == "finished" or (not last and ended == ["Finished after iteration"]):
        return "finished"
    if ended == ["Training failed in"] or (ended == ["Finished after iteration"] and last.get("ended")):
        return "failed"
    return "interrupted"


def last_written(folder: Path) -> float | None:
    """When the run wrote a log line or a metric for the last time, in seconds since 1970."""
    times = []
    for name in _WRITTEN:
        with suppress(OSError):
            times.append((folder / name).stat().st_mtime)
    return max(times, default=None)


def is_locked(path: Path) -> bool:
    """Whether a process of this machine trains in the folder."""
    try:
        entry = path.stat()
        with open("/proc/locks", encoding="ascii") as file:
            place = f"{os.major(entry.st_dev):02x}:{os.minor(entry.st_dev):02x}:{entry.st_ino}"
            return any(place in line.split() for line in file)
    except FileNotFoundError:  # another system than Linux
        pass
    except OSError:
        return False
    try:
        import fcntl

        descriptor = os.open(path, os.O_RDONLY)
    except (ImportError, OSError):  # Windows has no such lock
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a filesystem without locks
        return False
    finally:
        os.close(descriptor)
    return False


def read_tail(path: Path) -> str:
    """The end of a text file; empty without it."""
    try:
        with open(open_regular(path), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _writes_elsewhere(folder: Path, start: Mapping[str, Any]) -> bool:
    """Whether the run is one of another machine, whose locks are not seen here, and has written a short time ago."""
    host, written = start.get("machine", {}).get("host"), last_written(folder)
    return host not in (None, platform.node()) and written is not None and time.time() - written < _QUIET_S


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
    "best": {"metric": _is_text, "value": is_number, "iteration": is_count},
    "model": {"class": _is_text, "parameters": is_count},
    "git": {"commit": _is_text, "changed": _are_texts, "num_changed": is_count},
    "machine": {"memory_bytes": is_count, "accelerators": _are_devices},
    "data": {"*": {}},
    "phases": {"*": _is_positive},
    "versions": {},
    "numerics": {},
}
