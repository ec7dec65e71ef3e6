"""Scalars, pictures and histograms for TensorBoard."""

import os
from typing import TYPE_CHECKING

from trainwright.config.errors import ConfigError
from trainwright.events.figures import Histogram, Image
from trainwright.events.storage import EventStorage, get_event_storage
from trainwright.events.writers.base import EventWriter
from trainwright.events.writers.rows import rows_after

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter


class TensorBoardWriter(EventWriter):
    """Write what is new as TensorBoard events. The folder is touched, and tensorboard imported, at the first write.

    A run that starts at iteration N hides what earlier event files in the folder hold from step N on. Values put
    before the checkpoint that a resumed run starts from are left to the run that put them.
    """

    def __init__(self, log_dir: str | os.PathLike[str], window_size: int = 20) -> None:
        self._log_dir = os.fspath(log_dir)
        self._window_size = window_size
        self._last_written = -1
        self._last_figure = 0
        self._storage: EventStorage | None = None
        self._summary: SummaryWriter | None = None

    def __repr__(self) -> str:
        return f"TensorBoardWriter({self._log_dir!r}, window_size={self._window_size})"

    def write(self, storage: EventStorage | None = None) -> None:
        storage = get_event_storage() if storage is None else storage
        if storage is not self._storage:
            self.close()
            self._storage = storage
            self._last_written = storage.first_unwritten - 1
            self._last_figure = 0
        rows = rows_after(storage, self._last_written, self._window_size)
        figures = storage.figures(after=self._last_figure)
        if not (rows or figures):
            return
        if self._summary is None:
            self._summary = _open(self._log_dir, purge_step=self._last_written + 1)
        for iteration, row in rows.items():
            for name, value in row.items():
                self._summary.add_scalar(name, value, iteration)
            self._last_written = iteration
        for figure in figures:
            if isinstance(figure, Image):
                self._summary.add_image(figure.name, figure.pixels, figure.iteration)
            else:
                _add_histogram(self._summary, figure)
            self._last_figure = figure.number
        self._summary.flush()

    def close(self) -> None:
        if self._summary is not None:
            self._summary.close()
            self._summary = None


def _open(log_dir: str, *, purge_step: int) -> "SummaryWriter":
    try:
        from torch.utils.tensorboard.writer import SummaryWriter
    except ImportError as error:
        raise ConfigError(
            "TensorBoardWriter: the package tensorboard is not installed. Get it with `pip install tensorboard`, "
            "or leave this writer out of build_writers()."
        ) from error
    return SummaryWriter(log_dir, purge_step=purge_step)


def _add_histogram(summary: "SummaryWriter", histogram: "Histogram") -> None:
    low, high, count, total, total_of_squares, *counts = histogram.summary.tolist()
    if count == 0:  # every value was NaN or inf
        return
    width = (high - low) / len(counts)
    summary.add_histogram_raw(
        histogram.name,
        min=low,
        max=high,
        num=count,
        sum=total,
        sum_squares=total_of_squares,
        bucket_limits=[low + width * (place + 1) for place in range(len(counts))],
        bucket_counts=counts,
        global_step=histogram.iteration,
    )
