"""What the files of a run say about it: its state, progress and results. Reads small files only, without torch."""

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

STATES = ("running", "finished", "interrupted", "failed")
CONFIGS = ("config.yaml", "training_config.yaml")  # of config files, of the Python API
_TAIL_BYTES = 1 << 18  # of a log or a table of metrics
_NOT_RUNS = ("checkpoints", "profile", "__pycache__")


@dataclass(frozen=True, slots=True)
class Run:
    """What the table shows. None: unknown."""

    name: str
    path: str
    state: str
    iteration: int | None = None
    max_iteration: int | None = None
    metric: str | None = None
    best: float | None = None
    is_higher_better: bool | None = None
    loss: float | None = None
    started: str | None = None  # ISO 8601
    seconds: float | None = None
    commit: str | None = None

    @property
    def progress(self) -> float | None:
        return self.iteration / self.max_iteration if self.iteration and self.max_iteration else None


def run_folders(folder: Path, *, earlier: bool = False) -> Iterator[Path]:
    """The folders of runs in ``folder`` and below, itself included; without ``earlier``, none that was moved aside."""
    for path, names, files in os.walk(folder):
        is_run = any(name in files for name in CONFIGS) and {"log.txt", "metrics.json", "run.json"} & {*files}
        if is_run:
            yield Path(path)
        if "manifest.json" in files:  # a checkpoint
            names.clear()
        skipped = (*_NOT_RUNS, *([] if earlier else ["earlier_runs"])) if is_run else ("__pycache__",)
        names[:] = sorted(name for name in names if name not in skipped and not name.startswith("."))


def read_run(path: Path, base: Path) -> Run:
    """The state and the results of the run in ``path``, by its files; its name is relative to ``base``."""
    name = os.path.relpath(path, base)
    starts, log, rows = _starts(path / "run.json"), _tail(path / "log.txt"), _rows(path / "metrics.json")
    last = starts[-1] if starts else {}
    ended = re.findall(r"(Finished after iteration|Training failed in|Training was stopped in|Training\n)", log)
    state = "interrupted"
    if is_locked(path):
        state = "running"
    elif last.get("status") == "finished" or (not last and ended[-1:] == ["Finished after iteration"]):
        state = "finished"
    elif ended[-1:] == ["Training failed in"] or (ended[-1:] == ["Finished after iteration"] and last.get("ended")):
        state = "failed"
    planned = re.findall(r"\n  Iterations  \S+ to (\d+)", log)
    measured = [row["iteration"] + ("total_loss" in row) for row in rows if isinstance(row.get("iteration"), int)]
    best = _best(path, last, log)
    began = last.get("started") or _first_time(path / "log.txt")
    return Run(
        name=path.resolve().name if name == "." else name,
        path=str(path),
        state=state,
        iteration=last.get("iterations_done") or max(measured, default=None),
        max_iteration=last.get("last_iteration") or (int(planned[-1]) if planned else None),
        metric=best[0],
        best=best[1],
        is_higher_better=best[2],
        loss=next((loss for row in reversed(rows) if (loss := _loss(row)) is not None), None),
        started=(starts[0].get("started") if starts else None) or began,
        seconds=_seconds(path, starts, began, is_running=state == "running"),
        commit=(last.get("git") or {}).get("commit"),
    )


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
    import fcntl

    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a filesystem without locks
        return False
    finally:
        os.close(descriptor)
    return False


def setting(path: str | Path, key: str) -> Any:
    """The value of a setting in the run's configuration; None if it has no such key."""
    settings = _settings(Path(path))
    for part in key.split("."):
        if isinstance(settings, list) and part.isdigit() and int(part) < len(settings):
            settings = settings[int(part)]
        elif isinstance(settings, dict) and part in settings:
            settings = settings[part]
        else:
            return None
    return settings


def setting_names(path: str | Path) -> list[str]:
    """The dotted names of all settings of a run."""

    def names(value: Any, above: str) -> Iterator[str]:
        if above:
            yield above.removesuffix(".")
        if isinstance(value, dict | list):
            for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
                yield from names(inner, f"{above}{key}.")

    return list(names(_settings(Path(path)), ""))


def _settings(path: Path) -> Any:
    from trainwright.config.yaml_file import read_mapping

    if (path / CONFIGS[0]).is_file():
        return read_mapping(path / CONFIGS[0])
    sections = read_mapping(path / CONFIGS[1])  # settings in categories
    plain = {
        name: value for section in sections.values() if isinstance(section, dict) for name, value in section.items()
    }
    return {**sections, **plain}


def _starts(path: Path) -> list[dict[str, Any]]:
    try:
        starts = json.loads(path.read_bytes())["starts"]
        return [start for start in starts if isinstance(start, dict)]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return []


def _tail(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _rows(path: Path) -> list[dict[str, Any]]:
    rows = []
    for line in _tail(path).splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):  # cut off at the beginning, or being written
            continue
        rows += [row] if isinstance(row, dict) else []
    return rows


def _loss(row: dict[str, Any]) -> float | None:
    names = ["total_loss", *(name for name in row if "loss" in name and "/" not in name)]
    return next((float(row[name]) for name in names if isinstance(row.get(name), int | float)), None)


def _best(path: Path, last: dict[str, Any], log: str) -> tuple[str | None, float | None, bool | None]:
    """The name, the value and the direction of the metric that selects the best checkpoint."""
    if isinstance(found := last.get("best"), dict):
        return found.get("metric"), found.get("value"), found.get("is_higher_better")
    lines = re.findall(r"Best (\S+) so far: (\S+).* \((higher|lower) is better", log)
    for folder in (path, path / "checkpoints"):
        try:
            extra = json.loads((folder / "model_best" / "extra.json").read_bytes())
        except (OSError, ValueError):
            continue
        for name, value in extra.items() if isinstance(extra, dict) else ():
            if name != "iteration" and isinstance(value, int | float):
                return name, float(value), lines[-1][2] == "higher" if lines else "loss" not in name
    return (lines[-1][0], float(lines[-1][1]), lines[-1][2] == "higher") if lines else (None, None, None)


def _first_time(log: Path) -> str | None:
    try:
        with open(log, "rb") as file:
            return datetime.strptime(file.readline()[1:20].decode(), "%Y-%m-%d %H:%M:%S").astimezone().isoformat()
    except (OSError, ValueError):
        return None


def _seconds(path: Path, starts: list[dict[str, Any]], began: str | None, *, is_running: bool) -> float | None:
    """The time of all starts; the open one until now, or until the run last wrote."""
    closed = sum(float(start.get("seconds") or 0) for start in starts)
    if began is None or (starts and starts[-1].get("seconds") is not None):
        return closed or None
    files = [path / name for name in ("metrics.json", "log.txt") if (path / name).is_file()]
    end = datetime.now(UTC).timestamp() if is_running else max((file.stat().st_mtime for file in files), default=0.0)
    return max(0.0, closed + end - datetime.fromisoformat(began).timestamp())
