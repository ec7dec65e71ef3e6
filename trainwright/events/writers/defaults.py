"""The writers of a run that asks for no others."""

import sys
from collections.abc import Mapping
from pathlib import Path

from trainwright.events.writers.base import EventWriter
from trainwright.events.writers.console import ConsoleWriter
from trainwright.events.writers.csv_table import CSVWriter
from trainwright.events.writers.fault_tolerant import SafeWriter
from trainwright.events.writers.json_lines import JSONWriter
from trainwright.events.writers.progress import ProgressWriter
from trainwright.events.writers.tensorboard import TensorBoardWriter
from trainwright.terminal import is_terminal


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
) -> list[EventWriter]:
    """A progress bar on a terminal, lines on the console, ``metrics.json`` and TensorBoard's events in ``folder``.

    Args:
        batch_size: samples of an iteration, for the rate that is shown; 0 if unknown.
        table: a CSV file to write too.
        tensorboard: another folder for TensorBoard's events; None: no events.
        tensorboard_aliases: second names of metrics there, by their names.
    """
    writers: list[EventWriter] = []
    if progress_bar and is_terminal(sys.stdout):  # first, since the console's lines are left out while the bar is there
        writers.append(ProgressWriter(max_iter, batch_size=batch_size or None, file=sys.stdout))
    if console:
        writers.append(ConsoleWriter(batch_size, max_iter))
    writers.append(JSONWriter(Path(folder, "metrics.json")))
    if table is not None:
        writers.append(CSVWriter(table))
    if tensorboard is not None:
        writers.append(SafeWriter(TensorBoardWriter(tensorboard or folder, aliases=tensorboard_aliases)))
    return writers
