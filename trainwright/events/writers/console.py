"""The progress of a run as log lines, and a log handler that writes above a progress bar."""

import logging
import sys
from collections.abc import Callable
from typing import TextIO

from trainwright.base.terminal import coloured, columns_of, fitted, guarded, is_terminal
from trainwright.events.rate import speed, throughput
from trainwright.events.storage import EventStorage, get_event_storage
from trainwright.events.writers.base import EventWriter
from trainwright.events.writers.progress import live_bars, shown_values

logger = logging.getLogger("trainwright.events")
_RED, _YELLOW = 31, 33  # ANSI


class ConsoleWriter(EventWriter):
    """Log one line per write: the latest values of the training, the time of an iteration, and the time left.

    Losses and times are the median of the last ``window_size`` iterations. Results of evaluations have lines of their
    own. ``batch_size`` is the global batch size, for samples per second; 0: unknown. Records have the attribute
    ``progress=True``, so that a handler that shows a progress bar can skip them.
    """

    in_background = False  # keeps its lines in order with the program's output

    def __init__(self, batch_size: int, max_iter: int | Callable[[], int], window_size: int = 20) -> None:
        self._batch_size = batch_size
        self._length = max_iter if callable(max_iter) else lambda: max_iter
        self._window_size = window_size
        self._last_written = -1
        self._storage: EventStorage | None = None

    def __repr__(self) -> str:
        return f"ConsoleWriter({self._batch_size}, {self._max_iter}, window_size={self._window_size})"

    @property
    def _max_iter(self) -> int:
        return self._length()

    def write(self, storage: EventStorage | None = None) -> None:
        storage = get_event_storage() if storage is None else storage
        if storage is not self._storage:
            self._storage, self._last_written = storage, storage.start_iter - 1
        new = {
            name: found
            for name, found in storage.latest_with_smoothing_hint(self._window_size).items()
            if found[1] > self._last_written and name not in storage.results
        }
        if not new:
            return
        self._last_written = max(iteration for _, iteration in new.values())
        done = min(storage.iter + (not storage.is_over), self._max_iter)
        fields = [f"iteration {done}/{self._max_iter}", *(f"{k} {v}" for k, v in shown_values(new).items())]
        time_s = new["time"][0] if "time" in new else 0.0
        if time_s:
            fields += [speed(1 / time_s), throughput(self._batch_size / time_s) if self._batch_size else ""]
        fields.append(storage.rate.time_left(done, self._max_iter))
        if storage.line_at != done:
            logger.info("  ".join(filter(None, fields)), extra={"progress": True})


class ProgressAwareHandler(logging.StreamHandler[TextIO]):
    """A stream handler whose lines fit into a terminal and appear above a live progress bar; warnings in colour.

    In a pipe or a file only lines of values are broken, at 120 characters.
    While a bar is live on a terminal or in a notebook, records that only report progress are skipped
    (``extra={"progress": True}``).
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        super().__init__(guarded(sys.stderr if stream is None else stream))

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if "\n" not in text and (is_terminal(self.stream) or "  " in text):
            text = fitted(text, columns_of(self.stream), indent=9)
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
