"""Scalars, pictures and histograms for TensorBoard.

A file of events is written as TensorBoard's own writer does it (``tensorboard/summary/writer/event_file_writer.py``),
but without a second thread and queue: who is to be spared the wait hands over what is to be written before.
"""

import itertools
import os
import socket
import time
from pathlib import Path
from typing import Any

from trainwright.config.errors import ConfigError
from trainwright.events.figures import Histogram, Image
from trainwright.events.storage import EventStorage
from trainwright.events.writers.base import FileWriter
from trainwright.events.writers.records import RecordFile
from trainwright.events.writers.rows import Row, rows_after

_count = itertools.count()


class TensorBoardWriter(FileWriter):
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
        self._events: _EventFile | None = None

    def __repr__(self) -> str:
        return f"TensorBoardWriter({self._log_dir!r}, window_size={self._window_size})"

    def gather(self, storage: EventStorage) -> None:
        if storage is not self._storage:
            self.close()
            self._storage = storage
            self._last_written = storage.first_unwritten - 1
            self._last_figure = 0
        rows = rows_after(storage, self._last_written, self._window_size)
        figures = storage.figures(after=self._last_figure)
        if not (rows or figures):
            return
        if self._events is None:
            self._events = _EventFile(self._log_dir, purge_step=self._last_written + 1)
        for iteration, row in rows.items():
            self._events.add_scalars(row, iteration)
            self._last_written = iteration
        for figure in figures:
            self._events.add_figure(figure)
            self._last_figure = figure.number

    def flush(self) -> None:
        if self._events is not None:
            self._events.flush()

    def sync(self) -> None:
        if self._events is not None:
            self._events.sync()

    def close(self) -> None:
        if self._events is not None:
            self._events.close()
            self._events = None


class _EventFile:
    """A new file of events in a folder, which hides what older ones hold from ``purge_step`` on."""

    def __init__(self, folder: str, *, purge_step: int) -> None:
        try:
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog
            from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary
        except ImportError as error:
            raise ConfigError(
                "TensorBoardWriter: the package tensorboard is not installed. Get it with `pip install tensorboard`, "
                "or leave this writer out of build_writers()."
            ) from error
        # The package has no types.
        self._event: Any = Event
        self._summary: Any = Summary
        self._histogram: Any = HistogramProto
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_count)}"
        self._records = RecordFile(Path(folder, name))
        self._add(file_version="brain.Event:2")
        self._add(step=purge_step, session_log=SessionLog(status=SessionLog.START))
        self.flush()

    def add_scalars(self, row: Row, iteration: int) -> None:
        value = self._summary.Value
        self._add_values([value(tag=name, simple_value=number) for name, number in row.items()], iteration)

    def add_figure(self, figure: Image | Histogram) -> None:
        if isinstance(figure, Image):
            from torch.utils.tensorboard.summary import image

            summary: Any = image(figure.name, figure.pixels, dataformats="CHW")  # type: ignore[no-untyped-call]
            self._add(step=figure.iteration, summary=summary)
        else:
            self._add_histogram(figure)

    def flush(self) -> None:
        self._records.flush()

    def sync(self) -> None:
        self._records.sync()

    def close(self) -> None:
        self._records.close()

    def _add_histogram(self, histogram: Histogram) -> None:
        low, high, count, total, total_of_squares, *counts = histogram.summary.tolist()
        if count == 0:  # every value was NaN or inf
            return
        width = (high - low) / len(counts)
        content = self._histogram(
            min=low,
            max=high,
            num=count,
            sum=total,
            sum_squares=total_of_squares,
            bucket_limit=[low + width * (place + 1) for place in range(len(counts))],
            bucket=counts,
        )
        self._add_values([self._summary.Value(tag=histogram.name, histo=content)], histogram.iteration)

    def _add_values(self, values: list[Any], iteration: int) -> None:
        self._add(step=iteration, summary=self._summary(value=values))

    def _add(self, **content: Any) -> None:
        self._records.write(self._event(wall_time=time.time(), **content).SerializeToString())
