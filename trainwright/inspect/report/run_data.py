"""The content of a run's folder, for reports: metrics, settings, starts, checkpoints, warnings."""

import math
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainwright.base.errors import MissingFileError, missing_path
from trainwright.base.files import open_regular, read_regular
from trainwright.checkpoint.verify import CheckpointReport, inspect_folders
from trainwright.events.formats import (
    HARDEST_NAME,
    LOSSES_NAME,
    METRICS_NAME,
    RECORD_NAME,
    check_formats,
    parse_rows,
    read_hardest,
    read_starts,
    read_tail,
)
from trainwright.inspect.report.run_state import CONFIGS, last_written, settings_in, state_of

LOSS = "total_loss"

Array = npt.NDArray[np.float64]
_MAX_ITERATION = 1 << 53
_MAX_LOG, _MAX_WARNINGS = 1 << 24, 50
_MARKS = (METRICS_NAME, LOSSES_NAME, RECORD_NAME, *CONFIGS)


@dataclass(frozen=True)
class Curve:
    """The values of a metric that are finite, by the number of updates done; ``num_bad`` others are left out."""

    x: Array
    y: Array
    num_bad: int = 0


@dataclass(frozen=True)
class RunData:
    """A run's folder. Each part is read when it is first used."""

    folder: Path
    name: str

    @cached_property
    def starts(self) -> list[dict[str, Any]]:
        """Of ``run.json``, oldest first; empty for a loop of the user's own."""
        return read_starts(self.folder / RECORD_NAME)

    @property
    def latest(self) -> dict[str, Any]:
        return self.starts[-1] if self.starts else {}

    @property
    def status(self) -> str:
        """One of the states of `run_state`; "unknown" for a loop of the user's own."""
        return state_of(self.folder, self.starts) if self.starts else "unknown"

    @property
    def last_sign(self) -> float | None:
        """When a run without an end, such as a killed one, last wrote; None: it has ended or is in progress."""
        is_open = self.starts and "ended" not in self.latest and self.status != "running"
        return last_written(self.folder) if is_open else None

    @cached_property
    def curves(self) -> dict[str, Curve]:
        """The metrics by name. The loss is that of each update, where the run has written it."""
        found = dict(self._metrics)
        table = read_loss_table(self.folder / LOSSES_NAME)
        if table is not None and len((exact := _curve(table[:, 0] + 1, table[:, 1])).x):
            found[LOSS] = exact
        done = found[LOSS].x[-1] if LOSS in found and len(found[LOSS].x) else math.inf
        # The final evaluation has the number of the update that would follow.
        shown = {name: Curve(np.minimum(one.x, done), one.y, one.num_bad) for name, one in found.items()}
        per_epoch = self.latest.get("iterations_per_epoch")
        if per_epoch and done >= 2 * per_epoch:
            # Within an epoch a metric of the training is that of its first batches.
            shown |= {name: _at_ends(one, per_epoch) for name, one in shown.items() if f"eval_{name}" in shown}
        return shown

    @property
    def last_loss(self) -> tuple[float, str] | None:
        """The training loss of the last row of metrics, as lines and `runs` show it, and over what it is."""
        rows = self._metrics.get(LOSS)
        if rows is None or not len(rows.y):
            return None
        per_epoch, is_over = self.latest.get("iterations_per_epoch"), self.latest.get("status") == "finished"
        is_mean = per_epoch and (is_over or _ends_epoch(rows.x[-1], per_epoch))
        return float(rows.y[-1]), "mean of the last epoch" if is_mean else "median of the last updates"

    @cached_property
    def evaluated(self) -> set[str]:
        """The metrics of evaluations; those of a loop of the user's own by their names."""
        known = {name for start in self.starts for name in start.get("evaluated", ())}
        return known.union(name for name in self._metrics if name.startswith("eval_"))

    @cached_property
    def _metrics(self) -> dict[str, Curve]:
        return read_metrics(self.folder / METRICS_NAME)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The configuration, by dotted names, without secrets; of the Python API by the names of its settings."""
        return settings_in(self.folder)

    @cached_property
    def checkpoints(self) -> list[CheckpointReport]:
        """The checkpoints under their names, in the order of saving; sizes of files are checked, not their content."""
        return [entry for place in inspect_folders(self.folder, contents=False) for entry in place.found]

    @cached_property
    def hardest(self) -> list[dict[str, str]]:
        """The samples with the largest losses of each evaluation, the rows of ``hardest_samples.csv``."""
        return read_hardest(self.folder / HARDEST_NAME)

    @cached_property
    def warnings(self) -> list[str]:
        """The latest warnings and errors of ``log.txt``."""
        lines = read_tail(self.folder / "log.txt", _MAX_LOG).splitlines()
        found = [line for line in lines if " WARNING] " in line or " ERROR] " in line]
        return found[-_MAX_WARNINGS:]


def _ends_epoch(iterations: Any, per_epoch: float) -> Any:
    """Whether an epoch ends in each of the iterations, which count from 1; epochs may have a part of one."""
    return np.floor(iterations / per_epoch) > np.floor((iterations - 1) / per_epoch)


def _at_ends(curve: Curve, per_epoch: float) -> Curve:
    """The values at the ends of epochs, and the last one."""
    is_end = _ends_epoch(curve.x, per_epoch)
    is_end[-1:] = True
    return Curve(curve.x[is_end], curve.y[is_end], curve.num_bad)


def find_runs(paths: list[str]) -> list[RunData]:
    """The runs at ``paths``: a folder of a run, or a folder that has some.

    Raises:
        MissingFileError: there is no such folder, or no run in it.
    """
    found: dict[Path, None] = {}
    for text in paths:
        path = Path(text).expanduser()
        if path.is_file():
            run = f": {path.parent}" if is_run(path.parent) and path.parent != Path() else ""
            raise MissingFileError(f"{path}: is a file; pass the folder of a run{run}.")
        if not path.is_dir():
            raise missing_path(path, "there is no such folder.")
        inside = [path] if is_run(path) else sorted(one for one in path.iterdir() if one.is_dir() and is_run(one))
        if not inside:
            above = next((f" Did you mean {str(one)!r}?" for one in list(path.parents)[:2] if is_run(one)), "")
            raise MissingFileError(
                f"{text}: no run: neither it nor a folder in it has {METRICS_NAME}, {RECORD_NAME} or a configuration."
                f" Pass the output_dir of a run.{above}"
            )
        for folder in inside:
            check_formats(folder / RECORD_NAME)
        found |= dict.fromkeys(inside)
    folders = list(found)
    return [RunData(folder, name) for folder, name in zip(folders, short_names(folders), strict=True)]


def is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _MARKS)


def short_names(folders: list[Path]) -> list[str]:
    """The shortest ends of the paths that differ.

    >>> short_names([Path("/a/x/run"), Path("/a/y/run")])
    ['x/run', 'y/run']
    """
    parts = [folder.resolve().parts for folder in folders]
    length = 1
    while len({part[-length:] for part in parts}) < len(parts) and length < max(map(len, parts)):
        length += 1
    return ["/".join(part[-length:]) for part in parts]


def read_metrics(path: Path) -> dict[str, Curve]:
    """The metrics of a ``metrics.json`` by name, in the order of iterations; of two rows of one, the later counts."""
    values: dict[str, tuple[list[int], list[float]]] = {}
    with suppress(OSError), open(open_regular(path), "rb") as file:
        for row in parse_rows(file):
            at = row.pop("iteration")
            for name, value in row.items() if 0 <= at < _MAX_ITERATION else ():
                if value is None or isinstance(value, int | float):
                    xs, ys = values.setdefault(name, ([], []))
                    xs.append(at + 1)
                    ys.append(value if value is not None and abs(value) <= sys.float_info.max else math.nan)
    return {name: _curve(np.array(x, dtype=np.float64), np.array(y)) for name, (x, y) in sorted(values.items())}


def read_loss_table(path: Path) -> Array | None:
    """The rows (iteration from 0, loss) of a ``losses.csv``, all values; None without such a file."""
    try:
        content = read_regular(path)
    except OSError:
        return None
    header, _, body = content[: content.rfind(b"\n") + 1].partition(b"\n")
    if header != f"iteration,{LOSS}".encode():
        return None
    rows = []
    for line in body.splitlines():
        at, _, loss = line.partition(b",")
        with suppress(ValueError):  # damaged
            rows.append((float(at), float(loss)))
    table = np.array(rows, dtype=np.float64).reshape(-1, 2)
    return table[(table[:, 0] >= 0) & (table[:, 0] < _MAX_ITERATION)]


def sorted_by_x(x: Array, y: Array) -> tuple[Array, Array]:
    """Sorted by ``x``; of two values of one ``x`` the later one."""
    order = np.argsort(x, kind="stable")
    x, y = x[order], y[order]
    is_last = np.append(x[1:] != x[:-1], True)[: len(x)]
    return x[is_last], y[is_last]


def _curve(x: Array, y: Array) -> Curve:
    x, y = sorted_by_x(x, y)
    is_finite = np.isfinite(y)
    return Curve(x[is_finite], y[is_finite], int((~is_finite).sum()))
