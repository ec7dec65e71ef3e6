"""The progress of a run as log lines, and a log handler that writes above a progress bar."""

import datetime
import logging
import re
import sys
from dataclasses import dataclass
from typing import TextIO

from trainwright.events.storage import EventStorage, get_event_storage
from trainwright.events.writers.base import EventWriter
from trainwright.events.writers.progress import live_bars
from trainwright.terminal import coloured, guarded, is_terminal

logger = logging.getLogger("trainwright.events")
_ETA_WINDOW = 1000  # values of the iteration time; long, so that one slow evaluation does not change the ETA
_ETA_STEADY = _ETA_WINDOW // 5  # iterations before a full window's median is computed again: it costs more than a line
_RED, _YELLOW = 31, 33  # ANSI
_TIMES = ("time", "data_time", "eta_seconds")


@dataclass(frozen=True, slots=True)
class ShownMetrics:
    """The new metrics; an empty dict or None where there is no new value."""

    losses: dict[str, float]
    others: dict[str, float]
    time_s: float | None  # per iteration, mean over the window
    data_time_s: float | None
    lr: float | None
    last_iteration: int


def unit_of(name: str) -> str:
    """The unit shown after a value: top-k accuracies, ``Acc@k``, are in percent, as in LiBai."""
    return " %" if re.fullmatch(r"Acc@\d+", name.rpartition("/")[2]) else ""


def new_metrics(storage: EventStorage, after: int, window_size: int) -> ShownMetrics | None:
    """Metrics of iterations later than ``after``, or None if there are none."""
    new = {
        name: value
        for name, (value, iteration) in storage.latest_with_smoothing_hint(window_size).items()
        if iteration > after
    }
    if not new:
        return None

    def mean(name: str) -> float | None:
        return storage.history(name).avg(window_size) if name in new else None

    losses = {name: value for name, value in new.items() if "loss" in name}
    others = {name: value for name, value in new.items() if name not in (*losses, *_TIMES, "lr")}
    last_iteration = max(storage.history(name).latest_iteration() for name in new)
    return ShownMetrics(losses, others, mean("time"), mean("data_time"), new.get("lr"), last_iteration)


class ConsoleWriter(EventWriter):
    """Log one line per write: new losses, evaluation results, times, samples per second, learning rate.

    ``batch_size`` is the global batch size: samples per iteration. Records have the attribute ``progress=True``, so
    that a handler that shows a progress bar can skip them.
    """

    in_background = False  # keeps its lines in order with the program's output

    def __init__(self, batch_size: int, max_iter: int, window_size: int = 20) -> None:
        self._batch_size = batch_size
        self._max_iter = max_iter
        self._window_size = window_size
        self._last_written = -1
        self._storage: EventStorage | None = None
        self._time_s = 0.0  # of an iteration, for the ETA
        self._timed_at: int | None = None

    def __repr__(self) -> str:
        return f"ConsoleWriter({self._batch_size}, {self._max_iter}, window_size={self._window_size})"

    def write(self, storage: EventStorage | None = None) -> None:
        storage = get_event_storage() if storage is None else storage
        if storage is not self._storage:
            self._storage = storage
            self._last_written = storage.start_iter - 1
            self._timed_at = None
        new = new_metrics(storage, self._last_written, self._window_size)
        if new is None:
            return
        self._last_written = new.last_iteration
        logger.info("  ".join(self._fields(storage, new)), extra={"progress": True})

    def _fields(self, storage: EventStorage, new: ShownMetrics) -> list[str]:
        done = min(storage.iter + (not storage.is_over), self._max_iter)
        fields = [f"iteration: {done}/{self._max_iter}"]
        if self._batch_size:  # 0: unknown
            fields.append(f"consumed_samples: {storage.samples}")
        fields += [f"{name}: {value:.4g}{unit_of(name)}" for name, value in (new.losses | new.others).items()]
        if new.time_s is not None:
            seconds_left = self._time_of_iteration(storage) * (self._max_iter - done)
            fields.insert(0, f"eta: {datetime.timedelta(seconds=int(seconds_left))}")
            fields.append(f"time: {new.time_s:.4f} s/iter")
        if new.data_time_s is not None:
            fields.append(f"data_time: {new.data_time_s:.4f} s/iter")
        if new.time_s and self._batch_size:
            fields.append(f"total_throughput: {self._batch_size / new.time_s:.2f} samples/s")
        if new.lr is not None:
            fields.append(f"lr: {new.lr:.2e}")
        return fields

    def _time_of_iteration(self, storage: EventStorage) -> float:
        times = storage.history("time")
        at = times.latest_iteration()
        if self._timed_at is None or len(times) < _ETA_WINDOW or at - self._timed_at >= _ETA_STEADY:
            self._time_s, self._timed_at = times.median(_ETA_WINDOW), at
        return self._time_s


class ProgressAwareHandler(logging.StreamHandler[TextIO]):
    """A stream handler whose lines appear above a live progress bar; warnings and errors in colour on a terminal.

    While a bar is live on a terminal or in a notebook, records that only report progress are skipped
    (``extra={"progress": True}``).
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        super().__init__(guarded(sys.stderr if stream is None else stream))

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if record.levelno < logging.WARNING or not is_terminal(self.stream):
            return text
        return coloured(text, _RED if record.levelno >= logging.ERROR else _YELLOW, self.stream)

    def emit(self, record: logging.LogRecord) -> None:
        is_beside = bool(live_bars) and live_bars[0].takes(self.stream)
        if is_beside and getattr(record, "progress", False):
            return
        if not is_beside or not is_terminal(self.stream):
            super().emit(record)
            return
        try:
            live_bars[0].print_above(self.format(record))
        except RecursionError:
            raise
        except Exception:  # as in the handlers of the standard library: a logging error never stops a program
            self.handleError(record)
