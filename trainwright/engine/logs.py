"""How a run logs: to the console, and in the background to the log file of its folder."""

import functools
import logging
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from trainwright.checkpoint.files import is_at, open_regular
from trainwright.config.secrets import RedactingFormatter, redact
from trainwright.events.writers.console import ProgressAwareHandler
from trainwright.parallel.dist import get_rank
from trainwright.terminal import open_standard_streams, print_line

logger = logging.getLogger("trainwright.engine")

LOG_FORMAT = "[%(asctime)s %(name)s %(levelname)s] %(message)s"
_MAX_WAITING = 10_000  # lines


class LogFile(logging.Handler):
    """Append log lines to ``path`` in a background thread, which starts with the first line and ends with ``close``.

    A line is formatted when it is logged and queued when the call returns. The queue holds 10,000 lines; while it is
    full, new lines are dropped, and the file reports how many. A forked process has no such thread and writes
    synchronously.

    Raises:
        OSError: the file cannot be opened, or is not a regular file (a pipe, for example).
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__()
        self.path = Path(path)
        # No file object: if the thread holds its lock during a fork, the lock is never released in the child process.
        self._descriptor: int | None = open_regular(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._process = os.getpid()
        self._waiting: SimpleQueue[str | None] = SimpleQueue()  # None ends the thread
        self._num_left_out = 0
        self._thread: threading.Thread | None = None

    def __repr__(self) -> str:
        return f"LogFile({str(self.path)!r})"

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record) + "\n"
        except Exception:  # as in the handlers of the standard library: a logging error never stops a program
            self.handleError(record)
            return
        if os.getpid() != self._process:
            self._write(line)
        elif self._waiting.qsize() >= _MAX_WAITING:
            self._num_left_out += 1
        else:
            self._waiting.put(line)
            if self._thread is None and self._descriptor is not None:
                self._thread = threading.Thread(target=self._work, name="trainwright-log", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Wait until all lines are in the file, then close it."""
        thread, self._thread = self._thread, None
        if thread is not None and os.getpid() == self._process:
            self._waiting.put(None)
            thread.join()
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)
        super().close()

    def _work(self) -> None:
        is_over = False
        while not is_over:
            lines = [self._waiting.get()]
            while not self._waiting.empty():
                lines.append(self._waiting.get())
            is_over = None in lines
            if self._num_left_out:
                lines.append(f"({self._num_left_out} lines were dropped here: the disk was slower than the program.)\n")
                self._num_left_out = 0
            self._write("".join(line for line in lines if line is not None))

    def _write(self, text: str) -> None:
        block = text.encode(errors="backslashreplace")
        try:
            if self._descriptor is not None and not is_at(self._descriptor, self.path):  # deleted, or its folder moved
                os.close(self._descriptor)
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._descriptor = open_regular(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            while block and self._descriptor is not None:
                block = block[os.write(self._descriptor, block) :]
        except OSError as error:
            print_line(f"{self.path} cannot be written: {error}", file=sys.stderr)


def log_to_console(rank: int | None = None) -> None:
    """Log to the console: everything of rank 0, errors of the other ranks; above a progress bar, if there is one.

    Python's warnings are those of rank 0, too. ``rank``: of this process, if it has not joined the others yet.

    If the program has configured logging itself (the root logger has a handler), no handler is added. A level that the
    program has set on the logger "trainwright" is kept.
    """
    open_standard_streams()
    rank = get_rank() if rank is None else rank
    if rank > 0:
        warnings.showwarning = lambda message, *_: logger.debug("%s", message)
    library = logging.getLogger("trainwright")
    if library.level == logging.NOTSET:  # else the user has set it
        library.setLevel(logging.INFO)
    logging.getLogger("libai").parent = library  # the name that LiBai's examples log under
    if logging.getLogger().handlers or any(isinstance(h, ProgressAwareHandler) for h in library.handlers):
        return
    handler = ProgressAwareHandler(sys.stdout)
    handler.setFormatter(_ConsoleFormatter())
    handler.setLevel(logging.INFO if rank == 0 else logging.ERROR)
    handler.addFilter(lambda record: not getattr(record, "file_only", False))
    library.addHandler(handler)
    _redact_python_output()


class _ConsoleFormatter(RedactingFormatter):
    """``12:30:01 Training``: short, as a person reads it; warnings and errors with their level."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(message)s", datefmt="%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        level = f"{record.levelname}: " if record.levelno >= logging.WARNING else ""
        return f"{record.asctime} {level}{record.message}"


@contextmanager
def logging_only_above(level: int) -> Iterator[None]:
    """Without log lines up to ``level``; handlers and levels that are set inside are undone."""
    library, disabled = logging.getLogger("trainwright"), logging.root.manager.disable
    handlers, before = library.handlers[:], library.level
    logging.disable(level)
    try:
        yield
    finally:
        logging.disable(disabled)
        for handler in set(library.handlers) - set(handlers):
            with suppress(Exception):
                handler.close()
        library.handlers = handlers
        library.setLevel(before)


@functools.cache  # once per process
def _redact_python_output() -> None:
    """Mask secrets also in warnings, and in log lines of loggers without a handler, which Python prints itself."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(RedactingFormatter())
    formatted = warnings.formatwarning

    def formatwarning(*args: Any, **kwargs: Any) -> str:
        return redact(formatted(*args, **kwargs))

    warnings.formatwarning = formatwarning
