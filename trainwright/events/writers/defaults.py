"""The writers of a run that asks for no others."""

import sys
from pathlib import Path

from trainwright.events.writers.base import EventWriter
from trainwright.events.writers.console import ConsoleWriter
from trainwright.events.writers.csv_table import CSVWriter
from trainwright.events.writers.json_lines import JSONWriter
from trainwright.events.writers.progress import ProgressWriter
from trainwright.events.writers.safe import SafeWriter
from trainwright.events.writers.tensorboard import TensorBoardWriter


def default_writers(
    folder: str | Path, max_iter: int, *, batch_size: int, progress_bar: bool = True, table: bool = False
) -> list[EventWriter]:
    """A progress bar on a terminal, lines on the console, ``metrics.json`` and TensorBoard's events in ``folder``.

    Args:
        batch_size: samples of an iteration, for the rate that is shown; 0 if unknown.
        table: ``metrics.csv`` too.
    """
    writers: list[EventWriter] = []
    if progress_bar and sys.stdout.isatty():  # first, since the console's lines are left out while the bar is there
        writers.append(ProgressWriter(max_iter, batch_size=batch_size or None, file=sys.stdout))
    writers += [ConsoleWriter(batch_size, max_iter), JSONWriter(Path(folder, "metrics.json"))]
    if table:
        writers.append(CSVWriter(Path(folder, "metrics.csv")))
    return [*writers, SafeWriter(TensorBoardWriter(folder))]
