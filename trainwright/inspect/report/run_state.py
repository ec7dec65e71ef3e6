"""``run.json`` as far as it is valid, and the state of its run. Reads small files only, without other packages."""

import logging
import os
import platform
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainwright.base.terminal import printable
from trainwright.events.formats import LOSSES_NAME, METRICS_NAME

logger = logging.getLogger("trainwright.inspect.report")

CONFIGS = ("config.yaml", "training_config.yaml")  # of config files, of the Python API
STATES = ("running", "finished", "interrupted", "failed")
_WRITTEN = ("log.txt", METRICS_NAME, LOSSES_NAME)  # during a run
_QUIET_S = 600.0  # a run of another machine that has written nothing for so long does not run


def config_file(folder: Path) -> Path | None:
    """The configuration of the run in ``folder``; None: there is none."""
    return next((folder / name for name in CONFIGS if (folder / name).is_file()), None)


def read_config(folder: Path) -> dict[str, Any]:
    """The configuration of a run without secrets; empty, with a warning, if it cannot be read."""
    from trainwright.base.errors import ConfigError
    from trainwright.config.secrets import without_secrets
    from trainwright.config.yaml_file import read_mapping

    file = config_file(folder)
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


def settings_in(folder: Path, *, keeps_categories: bool = False) -> dict[str, Any]:
    """The configuration of a run by dotted names, without secrets; of the Python API by the names of its settings.

    ``keeps_categories``: those also with their categories.
    """
    found = dict(flat(read_config(folder)))
    if (folder / CONFIGS[0]).is_file():
        return found
    short = {name.partition(".")[2] or name: value for name, value in found.items()}
    return {**short, **found} if keeps_categories else short


def state_of(folder: Path, starts: list[dict[str, Any]]) -> str:
    """One of `STATES`. A killed run is "interrupted"; one on another machine is running while it writes."""
    last = starts[-1] if starts else {}
    if is_locked(folder) or ("ended" not in last and _writes_elsewhere(folder, last)):
        return "running"
    status = last.get("status")
    return status if status in STATES else "interrupted"


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


def _writes_elsewhere(folder: Path, start: Mapping[str, Any]) -> bool:
    """Whether the run is one of another machine, whose locks are not seen here, and has written a short time ago."""
    host, written = start.get("machine", {}).get("host"), last_written(folder)
    return host not in (None, platform.node()) and written is not None and time.time() - written < _QUIET_S
