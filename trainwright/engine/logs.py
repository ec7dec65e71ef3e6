"""How a run logs: to the console, and to the log file of its folder."""

import functools
import logging
import logging.handlers
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from trainwright.base.dist import get_rank, warns_here
from trainwright.base.files import open_regular
from trainwright.base.terminal import open_standard_streams, print_line
from trainwright.config.secrets import RedactingFormatter, redact
from trainwright.events.writers.console import ProgressAwareHandler

logger = logging.getLogger("trainwright.engine")

LOG_FORMAT = "[%(asctime)s %(name)s %(levelname)s] %(message)s"


class LogFile(logging.handlers.WatchedFileHandler):
    """Append log lines to a file, which is made again if it was deleted or its folder moved.

    What cannot be written stops nothing.

    Raises:
        OSError: the file cannot be opened, or is not a regular file (a pipe, for example).
    """

    def __init__(self, path: str | Path) -> None:
        os.close(open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND))
        super().__init__(path, encoding="utf-8", errors="backslashreplace")

    def emit(self, record: logging.LogRecord) -> None:
        try:
            os.makedirs(os.path.dirname(self.baseFilename), exist_ok=True)
            super().emit(record)
        except OSError:
            self.handleError(record)

    def close(self) -> None:
        with suppress(OSError):  # of the last lines, which is reported
            super().close()

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        if isinstance(sys.exception(), OSError):
            print_line(f"{self.baseFilename} cannot be written: {sys.exception()}", file=sys.stderr)
        else:
            super().handleError(record)


def log_to_console(rank: int | None = None) -> None:
    """Log to the console: everything of rank 0, errors of the other ranks; above a progress bar, if there is one.

    Warnings of another rank are logged where it computes what rank 0 does not (`warns_here`), with its number. Python's
    warnings are those of the same ranks. ``rank``: of this process, if it has not joined the others yet.

    If the program has configured logging itself (the root logger has a handler), no handler is added. A level that the
    program has set on the logger "trainwright" is kept.
    """
    open_standard_streams()
    rank = get_rank() if rank is None else rank
    if rank > 0:
        warnings.showwarning = lambda message, *_: logger.log(
            logging.WARNING if warns_here() else logging.DEBUG, "%s", message
        )
    library = logging.getLogger("trainwright")
    if library.level == logging.NOTSET:  # else the user has set it
        library.setLevel(logging.INFO)
    logging.getLogger("libai").parent = library  # the name that LiBai's examples log under
    if logging.getLogger().handlers or any(isinstance(h, ProgressAwareHandler) for h in library.handlers):
        return
    handler = ProgressAwareHandler(sys.stdout)
    handler.setFormatter(_ConsoleFormatter())
    handler.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    handler.addFilter(lambda record: not getattr(record, "file_only", False))
    if rank > 0:
        handler.addFilter(lambda record: record.levelno >= logging.ERROR or warns_here())
    library.addHandler(handler)
    _redact_python_output()


@contextmanager
def kept_records() -> Iterator[list[logging.LogRecord]]:
    """The log records until the end of this context, for the log file of a folder that is not known yet."""
    handler, library = logging.handlers.MemoryHandler(capacity=100_000), logging.getLogger("trainwright")
    library.addHandler(handler)
    try:
        yield handler.buffer
    finally:
        library.removeHandler(handler)
        handler.close()


class _ConsoleFormatter(RedactingFormatter):
    """``12:30:01 Training``: short, as a person reads it; warnings and errors with their level."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(message)s", datefmt="%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        level = f"{record.levelname}: " if record.levelno >= logging.WARNING else ""
        if record.levelno == logging.WARNING and (rank := get_rank()) > 0:
            level += f"rank {rank}: "
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
