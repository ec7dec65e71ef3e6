"""Where metrics go: files, TensorBoard, the log, the terminal; and the default writers of a run."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainwright.events.writers.base import EventWriter, SafeWriter
from trainwright.events.writers.console import ConsoleWriter, ProgressAwareHandler, ProgressWriter
from trainwright.events.writers.rows import METRICS_NAME, CSVWriter, JSONWriter, LossWriter
from trainwright.events.writers.tensorboard import TensorBoardWriter
from trainwright.events.writers.trackers import TRACKERS
from trainwright.terminal import is_terminal

__all__ = [
    "default_writers",
    "EventWriter",
    "JSONWriter",
    "CSVWriter",
    "LossWriter",
    "TensorBoardWriter",
    "ConsoleWriter",
    "ProgressWriter",
    "ProgressAwareHandler",
    "SafeWriter",
]


def default_writers(
    folder: str | Path,
    max_iter: int,
    *,
    batch_size: int,
    progress_bar: bool = True,
    console: bool = True,
    table: str | Path | None = None,
    tensorboard: str | Path | None = "",
    tensorboard_aliases: Mapping[str, str] | None = None,
    trackers: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> list[EventWriter]:
    """A progress bar on a terminal, log lines; ``metrics.json``, ``losses.csv`` and TensorBoard events in ``folder``.

    Args:
        batch_size: samples per iteration, for the displayed throughput; 0 if unknown.
        table: path of an additional CSV file.
        tensorboard: another folder for TensorBoard events; None: no events.
        tensorboard_aliases: second names of metrics in TensorBoard, by metric name.
        trackers: the arguments of experiment trackers, by name.
        settings: of the run, shown as hyperparameters by TensorBoard and the trackers.

    Raises:
        ConfigError: the package of a tracker is not installed.
    """
    writers: list[EventWriter] = []
    if progress_bar and is_terminal(sys.stdout):  # first, so that console lines are skipped while the bar is shown
        writers.append(ProgressWriter(max_iter, batch_size=batch_size or None, file=sys.stdout))
    if console:
        writers.append(ConsoleWriter(batch_size, max_iter))
    writers.append(JSONWriter(Path(folder, METRICS_NAME)))
    writers.append(LossWriter(Path(folder, "losses.csv")))
    if table is not None:
        writers.append(CSVWriter(table))
    if tensorboard is not None:
        writers.append(
            SafeWriter(TensorBoardWriter(tensorboard or folder, aliases=tensorboard_aliases, settings=settings))
        )
    for name, arguments in (trackers or {}).items():
        writers.append(SafeWriter(TRACKERS[name](folder, settings, arguments)))
    return writers
