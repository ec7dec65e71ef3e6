"""Where metrics go: files, TensorBoard, the log, the terminal; and the default writers of a run."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainwright.events.epoch_means import EpochLength
from trainwright.events.formats import LOSSES_NAME, METRICS_NAME
from trainwright.events.writers.base import EventWriter, SafeWriter
from trainwright.events.writers.console import ConsoleWriter
from trainwright.events.writers.progress import ProgressWriter, bar_stream
from trainwright.events.writers.rows import CSVWriter, JSONWriter, LossWriter
from trainwright.events.writers.tensorboard import TensorBoardWriter
from trainwright.events.writers.trackers import TRACKERS


def default_writers(
    folder: str | Path,
    max_iter: int | Callable[[], int],
    *,
    batch_size: int,
    progress_bar: bool = True,
    console: bool = True,
    table: str | Path | None = None,
    tensorboard: str | Path | None = "",
    tensorboard_aliases: Mapping[str, str] | None = None,
    trackers: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    iterations_per_epoch: EpochLength | None = None,
) -> list[EventWriter]:
    """A progress bar on a terminal, log lines; ``metrics.json``, ``losses.csv`` and TensorBoard events in ``folder``.

    Args:
        batch_size: samples per iteration, for the displayed throughput; 0 if unknown.
        table: path of an additional CSV file.
        tensorboard: another folder for TensorBoard events; None: no events.
        tensorboard_aliases: second names of metrics in TensorBoard, by metric name.
        trackers: the arguments of experiment trackers, by name.
        settings: of the run, shown as hyperparameters by TensorBoard and the trackers.
        iterations_per_epoch: for the progress bar; None: one bar for the run.

    Raises:
        ConfigError: the package of a tracker is not installed.
    """
    writers: list[EventWriter] = []
    if progress_bar and (terminal := bar_stream()) is not None:  # first: console lines are skipped while it is shown
        size, per_epoch = batch_size or None, iterations_per_epoch
        writers.append(ProgressWriter(max_iter, batch_size=size, file=terminal, iterations_per_epoch=per_epoch))
    if console:
        writers.append(ConsoleWriter(batch_size, max_iter))
    writers.append(JSONWriter(Path(folder, METRICS_NAME)))
    writers.append(LossWriter(Path(folder, LOSSES_NAME)))
    if table is not None:
        writers.append(CSVWriter(table))
    if tensorboard is not None:
        writers.append(
            SafeWriter(TensorBoardWriter(tensorboard or folder, aliases=tensorboard_aliases, settings=settings))
        )
    for name, arguments in (trackers or {}).items():
        writers.append(SafeWriter(TRACKERS[name](folder, settings, arguments)))
    return writers
