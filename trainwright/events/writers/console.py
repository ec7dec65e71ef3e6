"""The progress of a run: log lines, and a progress bar on a terminal with a log handler that writes above it."""

import datetime
import logging
import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from trainwright.events.storage import EventStorage, get_event_storage
from trainwright.events.writers.base import EventWriter
from trainwright.terminal import guarded

if TYPE_CHECKING:
    from tqdm import tqdm


logger = logging.getLogger("trainwright.events")
_ETA_WINDOW = 1000  # values of the iteration time; long, so that one slow evaluation does not change the ETA
_ETA_STEADY = _ETA_WINDOW // 5  # iterations before a full window's median is computed again: it costs more than a line
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

    @property
    def main_loss(self) -> float | None:
        """The total loss, or the first loss if there is no total."""
        return self.losses.get("total_loss", next(iter(self.losses.values()), None))


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


live_bars: set[object] = set()

"""Progress bars that are on the terminal now. Code that shows its own bar adds it here while the bar is visible."""


class ProgressAwareHandler(logging.StreamHandler[TextIO]):
    """A stream handler whose lines appear above a live progress bar.

    While a bar is live, records that only report progress (``extra={"progress": True}``) are skipped.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        super().__init__(guarded(sys.stderr if stream is None else stream))

    def emit(self, record: logging.LogRecord) -> None:
        if not live_bars:
            super().emit(record)
            return
        if getattr(record, "progress", False):
            return
        try:
            from tqdm import tqdm

            tqdm.write(self.format(record), file=self.stream)
            self.flush()
        except RecursionError:
            raise
        except Exception:  # as in the handlers of the standard library: a logging error never stops a program
            self.handleError(record)


class ProgressWriter(EventWriter):
    """One bar for the complete run: loss, learning rate and, given the global ``batch_size``, samples per second.

    For a terminal only; use ``ConsoleWriter`` otherwise. ``file`` is the terminal, by default stderr.
    """

    in_background = False

    def __init__(
        self,
        max_iter: int,
        *,
        batch_size: int | None = None,
        window_size: int = 20,
        file: TextIO | None = None,
    ) -> None:
        self._max_iter = max_iter
        self._batch_size = batch_size
        self._window_size = window_size
        self._file = file
        self._last_written = -1
        self._storage: EventStorage | None = None
        self._bar: tqdm[Any] | None = None

    def __repr__(self) -> str:
        return f"ProgressWriter({self._max_iter}, batch_size={self._batch_size}, window_size={self._window_size})"

    def begin(self, storage: EventStorage) -> None:
        """Show the bar and start measuring its rate."""
        self.close()
        self._storage = storage
        self._last_written = storage.start_iter - 1
        self._bar = self._open(storage.start_iter)

    def write(self, storage: EventStorage | None = None) -> None:
        storage = get_event_storage() if storage is None else storage
        if storage is not self._storage:
            self.close()
            self._storage = storage
            self._last_written = storage.start_iter - 1
        new = new_metrics(storage, self._last_written, self._window_size)
        if new is None:
            return
        self._last_written = new.last_iteration
        if self._bar is None:  # ``begin`` was not called: earlier iterations do not count for the rate
            self._bar = self._open(storage.iter + (not storage.is_over))
        self._bar.set_postfix_str(", ".join(self._fields(new)), refresh=False)
        self._bar.update(min(storage.iter + (not storage.is_over), self._max_iter) - self._bar.n)
        self._bar.refresh()

    def close(self) -> None:
        if self._bar is not None:
            live_bars.discard(self._bar)
            self._bar.close()
            self._bar = None

    def _open(self, start_iter: int) -> "tqdm[Any]":
        from tqdm import tqdm

        bar = tqdm(
            total=self._max_iter,
            initial=start_iter,
            desc="train",
            unit="it",
            dynamic_ncols=True,
            file=guarded(self._file if self._file is not None else sys.stderr),
        )
        live_bars.add(bar)
        return bar

    def _fields(self, new: ShownMetrics) -> list[str]:
        fields = [] if new.main_loss is None else [f"loss={new.main_loss:.4g}"]
        if new.lr is not None:
            fields.append(f"lr={new.lr:.2e}")
        if self._batch_size is not None and new.time_s:
            fields.append(f"{self._batch_size / new.time_s:.1f} samples/s")
        return fields + [f"{name}={value:.4g}" for name, value in new.others.items()]
