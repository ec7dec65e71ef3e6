"""What the runs of a sweep have reached: read from their folders, and shown in one table and one report."""

import csv
import difflib
import io
import math
import shutil
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainwright.base.errors import ConfigError, UserError, did_you_mean
from trainwright.base.files import atomic_write
from trainwright.base.terminal import is_terminal, print_line
from trainwright.cli.run_folder import SWEEP_TABLE, Run, read_run
from trainwright.cli.sweep.processes import OUTPUT, SIGNALS
from trainwright.cli.sweep.source import PlannedRun
from trainwright.cli.sweep.values import short_keys
from trainwright.events.formats import METRICS_NAME, RECORD_NAME, parse_rows, read_starts, read_tail
from trainwright.inspect.report.text import cell, duration, shown, table

REPORT = "report.html"  # in the folder of the sweep
NOT_STARTED = "not started"
_ERROR_WIDTH = 80
_STOPPED = [code for number in SIGNALS for code in (-number, 128 + number)]


@dataclass(frozen=True, slots=True)
class Result:
    """``state``: of `run_state.STATES`, or "not started". ``value``: of the metric that is compared."""

    run: PlannedRun
    state: str
    metric: str | None = None
    value: float | None = None
    is_higher_better: bool | None = None
    loss: float | None = None
    seconds: float | None = None
    error: str = ""


def read_result(
    run: PlannedRun, base: Path, metric: str | None, direction: str | None, code: int | None = None
) -> Result:
    """``code``: the exit code of its process, if it has ended just now.

    Raises:
        ConfigError: the run is complete, and has no such metric.
    """
    folder = base / run.name
    facts = read_run(folder, base) if folder.is_dir() else Run(run.name, str(folder), NOT_STARTED)
    state = facts.state
    if code is None:
        if facts.started is None and state == "interrupted":  # it has ended before it was a run
            state = NOT_STARTED
    elif code in _STOPPED:
        state = "interrupted"
    elif code:
        state = "failed"
    found = facts.metric, facts.best, facts.is_higher_better
    if metric is not None:
        found = metric, best_value(folder, metric, direction) if state == "finished" else None, direction == "maximize"
    error = _error(folder, code) if state == "failed" else ""
    return Result(run, state, *found, loss=facts.loss, seconds=facts.seconds, error=error)


def best_value(folder: Path, metric: str, direction: str | None) -> float | None:
    """The best of the values that a complete run has of a metric; None if none is finite."""
    from trainwright.inspect.report.run_data import read_metrics

    curves = read_metrics(folder / METRICS_NAME)
    if metric not in curves:
        raise _missing(metric, folder, curves)
    values = curves[metric].y
    return None if not len(values) else float(values.min() if direction == "minimize" else values.max())


def _missing(metric: str, folder: Path, names: Iterable[str]) -> ConfigError:
    return ConfigError(f"--metric: {folder} has no {metric!r} in {METRICS_NAME}. {did_you_mean(metric, names)}")


def is_misspelt(metric: str, names: Iterable[str]) -> bool:
    """Whether it is one of ``names`` but for a letter or two: no name of a value of the user's own."""
    return bool(difflib.get_close_matches(metric, [*names], n=1, cutoff=0.9))


class FirstEvaluation:
    """Looks at runs that train, until the first one has evaluated: whether it has the metric that is compared.

    ``is_own``: the metric may be a value of the user's own, which comes later, if its name is near to no other.
    """

    def __init__(self, metric: str | None, *, is_own: bool) -> None:
        self._metric, self._is_own = metric, is_own
        self._sizes: dict[Path, int] = {}

    def look(self, folders: Iterable[Path]) -> None:
        """
        Raises:
            ConfigError: a run has evaluated, and has no such metric.
        """
        for folder in folders if self._metric is not None else ():
            file = folder / METRICS_NAME
            size = file.stat().st_size if file.is_file() else 0
            if size != self._sizes.get(folder, 0):
                self._sizes[folder] = size
                self._look_at(folder)

    def _look_at(self, folder: Path) -> None:
        from trainwright.inspect.report.run_data import read_metrics

        assert self._metric is not None
        names = {name for row in parse_rows(read_tail(folder / METRICS_NAME).splitlines()) for name in row}
        starts = read_starts(folder / RECORD_NAME)
        if not (any(start.get("evaluated") for start in starts) or any(name.startswith("eval_") for name in names)):
            return
        names = {*read_metrics(folder / METRICS_NAME)}
        if self._metric not in names and (not self._is_own or is_misspelt(self._metric, names)):
            raise _missing(self._metric, folder, names)
        self._metric = None


def _error(folder: Path, code: int | None) -> str:
    """The line of a failed run's output that names its error: the last, or that of the command."""
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        return f"ended by {name}" + (", often the system's, out of memory" if name == "SIGKILL" else "")
    lines = [line.rstrip() for line in read_tail(folder / OUTPUT).splitlines() if line.strip()]
    named = [line.removeprefix("trainwright: ") for line in lines if line.startswith("trainwright: ")]
    return shown((named or lines or ["no output"])[-1].strip())


def sorted_results(results: Sequence[Result]) -> list[Result]:
    """The best first; runs without a value in their order at the end."""

    def place(result: Result) -> float:
        if result.value is None:
            return math.inf
        return -result.value if result.is_higher_better else result.value

    return sorted(results, key=place)


def write_table(results: Sequence[Result], keys: Sequence[str], folder: Path) -> None:
    """The file of the table, for other programs."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["run", "state", *keys, "metric", "value", "loss", "seconds", "error"])
    for one in results:
        values = [one.run.texts.get(key, "") for key in keys]
        writer.writerow([one.run.name, one.state, *values, one.metric, one.value, one.loss, one.seconds, one.error])
    atomic_write(folder / SWEEP_TABLE, text.getvalue().encode())


def lines_of(results: Sequence[Result], keys: Sequence[str]) -> list[str]:
    """The table; its lines are cut to the width of a terminal, and in a file or a pipe errors to ``_ERROR_WIDTH``.

    The file of the table has complete errors.
    """
    width = shutil.get_terminal_size().columns if is_terminal(sys.stdout) else None
    names = short_keys(keys)
    are_in_names = all(one.run.name.startswith(f"{names[keys[0]]}=") for one in results)
    columns: dict[str, list[str]] = {
        "run": [shown(one.run.name) for one in results],
        "state": [one.state for one in results],
    }
    for key in () if are_in_names else keys:
        columns[names[key]] = [cell(_short(one.run.texts.get(key, "")), 20) for one in results]
    columns["best"] = ["" if one.value is None else f"{shown(one.metric)} {one.value:.4g}" for one in results]
    columns["loss"] = ["" if one.loss is None else f"{one.loss:.4g}" for one in results]
    columns["duration"] = ["" if one.seconds is None else duration(one.seconds) for one in results]
    if any(one.error for one in results):
        columns["error"] = [cell(one.error, _ERROR_WIDTH) if width is None else one.error for one in results]
    lines = table([[*columns], *(list(row) for row in zip(*columns.values(), strict=True))])
    return lines if width is None else [cell(line, width) for line in lines]


def _short(text: str) -> str:
    try:
        return f"{float(text):.4g}"
    except ValueError:
        return text


def write_report(folder: Path, names: Sequence[str]) -> None:
    """The HTML page of the runs, or a line that says why there is none."""
    from trainwright.inspect.report.page import page
    from trainwright.inspect.report.run_data import find_runs, is_run

    runs = [str(folder / name) for name in names if is_run(folder / name)]
    if not runs:
        return
    try:
        atomic_write(folder / REPORT, page(find_runs(runs)).encode())
        print_line(f"Report: {folder / REPORT}")
    except UserError as error:  # without plotly
        print_line(f"No report: {error}")


def counts(results: Sequence[Result]) -> Mapping[str, int]:
    states = [one.state for one in results]
    return {state: states.count(state) for state in dict.fromkeys(states)}
