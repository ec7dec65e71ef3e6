"""A progress bar on a terminal, and a log handler that writes its lines above the bar."""

import logging
import sys
from typing import TYPE_CHECKING, Any, TextIO

from trainwright.events.storage import EventStorage, get_event_storage
from trainwright.events.writers.base import EventWriter
from trainwright.events.writers.console import ShownMetrics, new_metrics
from trainwright.terminal import guarded

if TYPE_CHECKING:
    from tqdm import tqdm

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
