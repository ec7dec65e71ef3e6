"""A live bar on a terminal or in a notebook. Its own thread draws it, from numbers that the training has anyway.

So it costs nothing per step.
"""

import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, TextIO

from trainwright.base.notebook import at_end_of_cell, is_kernel
from trainwright.base.stacks import stack_of
from trainwright.base.terminal import fitted, guarded, is_terminal, printable, shows_live_text
from trainwright.events.epoch_means import EpochLength
from trainwright.events.phases import activities
from trainwright.events.rate import Position, Rate, clock, speed, throughput
from trainwright.events.storage import EventStorage, get_event_storage
from trainwright.events.writers.base import EventWriter
from trainwright.events.writers.notebook import Content, NotebookDisplay

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

logger = logging.getLogger("trainwright.events")

_REFRESH_S, _NOTEBOOK_REFRESH_S = 0.25, 0.5
_READ_S = 1.0  # the period of reading metrics, which makes the training convert them to numbers
_MIN_BAR, _MAX_BAR = 20, 40  # cells
_DEBUGGERS = ("pdb", "bdb", "cmd", "code", "pudb", "IPython.terminal.debugger")
_TIMES = ("time", "data_time", "eta_seconds")

live_bars: list["LiveBar"] = []

"""The bars that are on the terminal now, at most one. Lines are written above it."""


class LiveBar:
    """``Epoch 2/10 ━━━━━━━╸━━━━ 340/512  12.3 it/s  ETA 0:14, run 1:53``, and the metrics after or below it.

    ``position`` and ``values`` are called by the bar's thread. On a terminal, ``print`` and log lines appear above the
    bar. In a notebook it is HTML, with a table and a picture of the losses; ``print`` and log lines appear below it.

    Args:
        position: reads where the run is.
        values: reads the metrics to show, by name; they are shown in this order, as many as fit.
        title: shown if there are no epochs.
        batch_size: samples of an iteration, to show samples per second.
        stays: leave the bar on the screen at its end.
        storage: has the rate, and the losses of the picture in a notebook.
    """

    def __init__(
        self,
        position: Callable[[], Position],
        values: Callable[[], Mapping[str, str]],
        *,
        file: TextIO,
        title: str = "train",
        batch_size: int | None = None,
        stays: bool = True,
        storage: EventStorage | None = None,
    ) -> None:
        self.notice = ""  # shown below the bar; a signal handler may set it
        self._position, self._values, self._title, self._batch_size = position, values, title, batch_size
        self._rate = Rate(position().start) if storage is None else storage.rate
        self._is_over = self._has_failed = False
        self._trains_in = threading.get_ident()
        self.file = file
        self._stays, self._error_before, self._end = stays, sys.exception(), ""
        self._notebook = NotebookDisplay(storage) if file in (sys.stdout, sys.stderr) and is_kernel() else None
        self._live: Live | None = None
        self._redirected: list[tuple[logging.StreamHandler[Any], Any]] = []
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._revoke: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._run, name="progress bar", daemon=True)

    @cached_property
    def console(self) -> "Console":
        from rich.console import Console

        class Terminal(Console):
            def show_cursor(self, show: bool = True) -> bool:
                return False  # never hidden, so that a killed run leaves the terminal complete

        return Terminal(file=guarded(self.file), highlight=False, markup=False, emoji=False)

    def start(self) -> None:
        """Show it, unless there is a bar already."""
        if not live_bars:
            live_bars.append(self)
            if self._notebook is not None and threading.current_thread() is threading.main_thread():
                # The error of a cell keeps its frames, and with them a loop of the user's own that is not closed.
                self._revoke = at_end_of_cell(self.close)
            self._show()
            self._thread.start()

    def close(self, error: BaseException | None = None) -> None:
        """End the bar, at the position that the run has reached. A second call does nothing.

        ``error``: what ended the run, by default the error that is being handled.
        """
        if self not in live_bars:
            return
        self._revoke()
        self._is_over, self._end = True, self._how_it_ends(error or sys.exception())
        self._ended.set()
        with self._lock:
            self._hide(transient=not self._stays)
        live_bars.remove(self)

    def add_row(self, row: Mapping[str, str]) -> bool:
        """Add a row to the table of a notebook, by the names of columns; False: there is no table."""
        if self._notebook is not None:
            self._notebook.add_row(row)
        return self._notebook is not None

    def takes(self, stream: TextIO) -> bool:
        """Whether the bar shows what lines about the progress would show where ``stream`` is written."""
        return stream in (sys.stdout, sys.stderr) if self._notebook is not None else is_terminal(stream)

    def _how_it_ends(self, error: BaseException | None) -> str:
        at = self._position()
        if error is None or error is self._error_before:
            return "finished" if at.done >= at.total else "stopped"
        if isinstance(error, KeyboardInterrupt):
            return "interrupted"
        return f"failed: {type(error).__name__}" if isinstance(error, Exception) else "stopped"

    def _run(self) -> None:
        while not self._ended.wait(_REFRESH_S if self._notebook is None else _NOTEBOOK_REFRESH_S):
            is_debugged = _is_debugged(self._trains_in)
            with self._lock:
                if self._ended.is_set():
                    return
                if is_debugged and self._notebook is None:
                    self._hide(transient=True)
                elif self._live is None:
                    self._show()
                else:
                    self._live.refresh()

    def _show(self) -> None:
        if self._notebook is not None:
            try:
                if not self._has_failed:
                    self._notebook.show(self._content(self._position()))
            except Exception as error:  # a bar never ends a training
                self._has_failed = True
                text = "The progress display failed (%s: %s). The training continues."
                logger.warning(text, type(error).__name__, error)
            return
        from rich.live import Live

        handlers = [one for one in logging.getLogger().handlers if isinstance(one, logging.StreamHandler)]
        before = {stream: name for name in ("stdout", "stderr") if is_terminal(stream := getattr(sys, name))}
        self._live = Live(
            get_renderable=self._render,
            console=self.console,
            auto_refresh=False,
            redirect_stdout=sys.stdout in before,
            redirect_stderr=sys.stderr in before,
        )
        self._live.start(refresh=True)
        # Handlers of the program's own write to the streams from before.
        for handler in handlers:
            if handler.stream in before:
                self._redirected.append((handler, handler.stream))
                handler.setStream(getattr(sys, before[handler.stream]))

    def _hide(self, *, transient: bool) -> None:
        if self._notebook is not None:
            if transient:
                self._notebook.clear()
            else:
                self._show()
        if self._live is None:
            return
        live, self._live = self._live, None
        live.transient = transient
        try:
            live.stop()
        finally:
            for handler, stream in self._redirected:
                handler.setStream(stream)
            self._redirected.clear()

    def print_above(self, text: str) -> None:
        """Print a line above the bar, which may have escape codes for colours."""
        from rich.text import Text

        self.console.print(Text.from_ansi(text), soft_wrap=True)

    def _render(self) -> "Group | Text":
        try:
            return self._drawn(self._content(self._position()), self.console.width)
        except Exception as error:  # a bar never ends a training
            return _text(f"{self._title}: the progress bar failed ({type(error).__name__}: {error})")

    def _content(self, at: Position) -> Content:
        now = activities[-1] if activities and not self._is_over else None
        self._rate.update(at.done)
        metrics = [f"{name} {value}" for name, value in self._values().items()]
        if self._batch_size and self._rate.per_s:
            metrics.append(throughput(self._batch_size * self._rate.per_s))
        activity = ""
        if now is not None or (at.done == at.start and not self._is_over):
            name = "starting" if now is None else now.name
            seconds = clock(self._rate.elapsed_s if now is None else time.monotonic() - now.start)
            part = f" {now.done}/{now.total}" if now is not None and now.total else ""
            activity = f"{name}{part}  {seconds}"
        label = f"Epoch {at.epoch}/{at.num_epochs}" if at.num_epochs > 1 else self._title
        notice = "" if self._is_over else self.notice
        return Content(label, *at.of_epoch, self._times(at), metrics, activity, notice, self._end)

    def _drawn(self, content: Content, width: int) -> "Group":
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        label, done, total, fields, metrics = content[:5]
        count = f"{done:>{len(str(total))}}/{total}"
        is_one_line = len("  ".join([label, count, *fields, *metrics])) + 2 + _MIN_BAR <= width
        fields += metrics if is_one_line else []
        right = "  ".join([count, *fields])
        room = width - len(label) - len(right) - 3
        while room < _MIN_BAR and len(fields) > 1:
            right = "  ".join([count, *(fields := fields[:-1])])
            room = width - len(label) - len(right) - 3
        table = Table.grid(padding=(0, 1, 0, 0))
        bar = ProgressBar(total=max(total, 1), completed=done, width=max(1, min(_MAX_BAR, room)))
        table.add_row(_text(label, "bold"), bar, _text(right))
        below = [_text(text, style) for text, style in ((content.activity, "cyan"), (content.notice, "yellow")) if text]
        if not is_one_line and metrics:
            below.insert(0, _text(fitted("  ".join(metrics), width - 2, indent=0).partition("\n")[0]))
        return Group(table, *below)

    def _times(self, at: Position) -> list[str]:
        rate = self._rate.per_s
        if self._is_over or at.done >= at.total:
            return [*([] if rate is None else [speed(rate)]), f"in {clock(self._rate.elapsed_s)}"]
        if rate is None:  # before two iterations
            return [clock(self._rate.elapsed_s)]
        (done, total), run = at.of_epoch, self._rate.left_s(at.total - at.done)
        if at.num_epochs <= 1:
            return [speed(rate), f"ETA {clock(run)}"]
        epoch = self._rate.left_s(total - done, with_interruptions=False)
        return [speed(rate), f"ETA {clock(epoch)}, run {clock(run)}"]


class ProgressWriter(EventWriter):
    """A bar for a terminal or a notebook, with the rate, the time left, the loss, the metrics and the learning rate.

    It moves by time, from the start of the training: a thread reads the storage. Use ``ConsoleWriter`` where there is
    no terminal. ``batch_size``: the global one, to show samples per second. ``iterations_per_epoch``: show a bar for
    each epoch instead of one for the run. ``file``: the terminal, by default stderr.
    """

    in_background = False

    def __init__(
        self,
        max_iter: int | Callable[[], int],
        *,
        batch_size: int | None = None,
        window_size: int = 20,
        file: TextIO | None = None,
        iterations_per_epoch: EpochLength | None = None,
    ) -> None:
        self._length, self._per_epoch = max_iter if callable(max_iter) else lambda: max_iter, iterations_per_epoch
        self._batch_size = batch_size
        self._window_size = window_size
        self._file = file
        self._storage: EventStorage | None = None
        self._bar: LiveBar | None = None
        self._shown: dict[str, str] = {}
        self._done = 0  # iterations
        self._next_read = 0.0  # time in seconds

    def __repr__(self) -> str:
        return f"ProgressWriter({self._max_iter}, batch_size={self._batch_size}, window_size={self._window_size})"

    @property
    def _max_iter(self) -> int:
        return self._length()

    def begin(self, storage: EventStorage) -> None:
        """Show the bar and start measuring its rate."""
        self.close()
        self._storage, self._done = storage, 0
        self._bar = LiveBar(
            self._position,
            self._values,
            file=self._file if self._file is not None else sys.stderr,
            batch_size=self._batch_size,
            storage=storage,
        )
        self._bar.start()

    def write(self, storage: EventStorage | None = None) -> None:
        """Show the bar if ``begin`` was not called; else nothing, as the bar reads the storage itself."""
        storage = get_event_storage() if storage is None else storage
        if storage is not self._storage or self._bar is None:
            self.begin(storage)

    def close(self) -> None:
        if self._bar is not None:
            self._next_read = 0.0
            self._bar.close()
            self._bar = None

    def _position(self) -> Position:
        storage = self._storage
        assert storage is not None, "begin() sets it"
        # After a failure, storage.iter is the last complete iteration: what has been shown is not taken back.
        self._done = max(self._done, min(storage.iter, self._max_iter))
        return Position(self._done, self._max_iter, storage.start_iter, self._per_epoch)

    def _values(self) -> dict[str, str]:
        now = time.monotonic()
        if self._storage is not None and not activities and now >= self._next_read:
            self._next_read = now + _READ_S
            found = self._storage.read_so_far(self._window_size)
            self._shown = shown_values(found)
            self._storage.convert_soon()
        return self._shown


def shown_values(found: Mapping[str, tuple[float, int]]) -> dict[str, str]:
    """Losses, metrics, results of evaluations and the learning rate as text, in this order, by their names.

    ``found``: each value and its iteration.

    >>> shown_values({"lr": (0.1, 3), "eval_loss": (0.5, 3), "total_loss": (0.25, 3), "time": (0.1, 3)})
    {'total_loss': '0.2500', 'eval_loss': '0.5000', 'lr': '1.00e-01'}
    """

    def place(name: str) -> int:
        return 0 if name == "total_loss" else 3 if name == "lr" else 2 if name.startswith("eval_") else 1

    values = {name: value for name, (value, _) in found.items() if name not in _TIMES}
    return {
        name: f"{values[name]:.2e}" if name == "lr" else f"{values[name]:#.4g}".rstrip(".") + unit_of(name)
        for name in sorted(values, key=place)
    }


def unit_of(name: str) -> str:
    """The unit shown behind a value: top-k accuracies, ``Acc@k``, are in percent, as in LiBai."""
    return " %" if re.fullmatch(r"Acc@\d+", name.rpartition("/")[2].removeprefix("eval_")) else ""


def bar_stream() -> TextIO | None:
    """Where a bar is shown: stdout, or stderr where stdout is a pipe or a file. None: no notebook and no terminal."""
    if is_kernel():
        return sys.stdout
    return next((stream for stream in (sys.stdout, sys.stderr) if shows_live_text(stream)), None)


def _text(text: str, style: str = "") -> "Text":
    from rich.text import Text

    return Text(printable(text), style=style, no_wrap=True, overflow="ellipsis")


def _is_debugged(thread: int) -> bool:
    """Whether a thread waits for input in a debugger: near its innermost frame."""
    files = {getattr(sys.modules.get(name), "__file__", None) for name in _DEBUGGERS}
    return any(line.split('"')[1] in files for line in stack_of(thread)[:8] if '"' in line)


def _forget_in_child() -> None:
    """A forked process, such as a worker of a loader, has no thread that draws; it prints as without a bar."""
    for bar in live_bars:
        for handler, stream in bar._redirected:
            handler.stream = stream
    live_bars.clear()
    for name in ("stdout", "stderr"):
        setattr(sys, name, getattr(getattr(sys, name), "rich_proxied_file", getattr(sys, name)))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)
