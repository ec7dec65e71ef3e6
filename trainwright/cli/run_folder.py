"""What the files of a run say about it: its state, progress and results. Reads small files only, without torch."""

import csv
import functools
import logging
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trainwright.base.errors import ConfigError
from trainwright.events.formats import (
    METRICS_NAME,
    RECORD_NAME,
    check_formats,
    is_number,
    parse_rows,
    read_starts,
    read_tail,
)
from trainwright.inspect.report.run_state import CONFIGS, last_written, settings_in, state_of

logger = logging.getLogger("trainwright.inspect.report")

SWEEP_TABLE = "sweep.csv"  # in the folder of a sweep: its runs that have ended
_NOT_RUNS = ("checkpoints", "profile", "__pycache__")


@dataclass(frozen=True, slots=True)
class Run:
    """What the table shows. None: unknown."""

    name: str
    path: str
    state: str
    reason: str | None = None  # what has ended it before its planned end
    iteration: int | None = None
    max_iteration: int | None = None
    metric: str | None = None
    best: float | None = None
    is_higher_better: bool | None = None
    loss: float | None = None
    started: str | None = None  # ISO 8601
    seconds: float | None = None
    commit: str | None = None
    error: str | None = None  # of a failed run of a sweep

    @property
    def progress(self) -> float | None:
        return self.iteration / self.max_iteration if self.iteration and self.max_iteration else None


def run_folders(folder: Path, *, earlier: bool = False) -> Iterator[Path]:
    """The folders of runs in ``folder`` and below, itself included; without ``earlier``, none that was moved aside."""
    return (path for path, _, is_run in _walk(folder, earlier=earlier) if is_run)


def read_runs(base: Path, *, earlier: bool = False) -> list[Run]:
    """Those in `run_folders`, and those of sweeps that have failed before they began to train."""
    runs, errors = dict[Path, Run](), dict[Path, str]()
    for path, files, is_run in _walk(base, earlier=earlier):
        if SWEEP_TABLE in files:
            errors |= _errors_in(path)
        if is_run:
            runs[path] = read_run(path, base)
    for path, error in errors.items():
        run = runs.get(path) or Run(os.path.relpath(path, base), str(path), "failed")
        if run.state in ("failed", "interrupted"):  # not one that is tried again
            runs[path] = replace(run, error=error)
    return list(runs.values())


def _errors_in(sweep: Path) -> dict[Path, str]:
    """The errors of the failed runs of a sweep, by their folders."""
    with suppress(OSError, csv.Error), open(sweep / SWEEP_TABLE, encoding="utf-8", errors="replace") as file:
        failed = [row for row in csv.DictReader(file) if row.get("state") == "failed"]
        errors = {sweep / Path(row["run"]).name: row.get("error") or "" for row in failed if row.get("run")}
        return {folder: error for folder, error in errors.items() if folder != sweep and folder.is_dir()}
    return {}


def _walk(folder: Path, *, earlier: bool) -> Iterator[tuple[Path, list[str], bool]]:
    """Each folder with its files, and whether it is that of a run."""
    for path, names, files in os.walk(folder):
        is_run = any(name in files for name in CONFIGS) and bool({"log.txt", "metrics.json", "run.json"} & {*files})
        yield Path(path), files, is_run
        if "manifest.json" in files:  # a checkpoint
            names.clear()
        skipped = (*_NOT_RUNS, *([] if earlier else ["earlier_runs"])) if is_run else ("__pycache__",)
        names[:] = sorted(name for name in names if name not in skipped and not name.startswith("."))


def read_run(path: Path, base: Path) -> Run:
    """The state and the results of the run in ``path``, by its files; its name is relative to ``base``."""
    name = os.path.relpath(path, base)
    try:
        check_formats(path / RECORD_NAME)
    except ConfigError as error:  # one of many runs
        logger.warning("%s", error)
    starts = read_starts(path / RECORD_NAME)
    rows = [*parse_rows(read_tail(path / METRICS_NAME).splitlines())]
    last = starts[-1] if starts else {}
    state = state_of(path, starts)
    measured = [row["iteration"] + ("total_loss" in row) for row in rows]
    best: dict[str, Any] = next((start["best"] for start in reversed(starts) if start.get("best")), {})
    return Run(
        name=path.resolve().name if name == "." else name,
        path=str(path),
        state=state,
        reason=last.get("reason"),
        iteration=last.get("iterations_done") or max(measured, default=None),
        max_iteration=last.get("last_iteration"),
        metric=best.get("metric"),
        best=best.get("value"),
        is_higher_better=best.get("is_higher_better"),
        loss=next((loss for row in reversed(rows) if (loss := _loss(row)) is not None), None),
        started=starts[0].get("started") if starts else None,
        seconds=_seconds(path, starts, is_running=state == "running"),
        commit=(last.get("git") or {}).get("commit"),  # None: no repository
    )


@functools.lru_cache(maxsize=1000)  # each column and each condition reads the settings
def settings_of(path: str) -> dict[str, Any]:
    """The settings of a run by their dotted names; those of the Python API also without their categories."""
    return settings_in(Path(path), keeps_categories=True)


def _loss(row: dict[str, Any]) -> float | None:
    names = ["total_loss", *(name for name in row if "loss" in name and not name.startswith("eval_"))]
    return next((float(row[name]) for name in names if is_number(row.get(name))), None)


def _seconds(path: Path, starts: list[dict[str, Any]], *, is_running: bool) -> float | None:
    """The time of all starts; the open one until now, or until the run last wrote."""
    closed = sum(float(start.get("seconds") or 0) for start in starts)
    began = starts[-1].get("started") if starts else None
    if began is None or "seconds" in starts[-1]:
        return closed or None
    end = datetime.now(UTC).timestamp() if is_running else last_written(path) or 0.0
    return max(0.0, closed + end - datetime.fromisoformat(began).timestamp())
