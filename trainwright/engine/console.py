"""Where the log lines of this library are shown."""

import functools
import logging
import sys
import warnings
from typing import Any

from trainwright.config.secrets import RedactingFormatter, redact
from trainwright.engine.run_directory import LOG_FORMAT
from trainwright.events.writers.progress import ProgressAwareHandler
from trainwright.parallel.dist import get_rank
from trainwright.terminal import open_standard_streams


def log_to_console() -> None:
    """Show the log lines of this library: all of rank 0, warnings of the others; above a progress bar, if any.

    Where the program has set up logging itself (the root logger has a handler), that is left to decide; and a level
    that it has set on the logger "trainwright" stays.
    """
    open_standard_streams()
    library = logging.getLogger("trainwright")
    if library.level == logging.NOTSET:  # else the user has set it
        library.setLevel(logging.INFO)
    logging.getLogger("libai").parent = library  # the documents' examples log under that name: shown where ours are
    if logging.getLogger().handlers or any(isinstance(h, ProgressAwareHandler) for h in library.handlers):
        return
    handler = ProgressAwareHandler(sys.stdout)
    handler.setFormatter(RedactingFormatter(LOG_FORMAT, datefmt="%H:%M:%S"))
    handler.setLevel(logging.INFO if get_rank() == 0 else logging.WARNING)
    handler.addFilter(lambda record: not getattr(record, "file_only", False))
    library.addHandler(handler)
    _redact_what_python_shows()


@functools.cache  # once in a process
def _redact_what_python_shows() -> None:
    """Mask secrets also in warnings, and in log lines of loggers that have no handler, which Python prints itself."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(RedactingFormatter())
    formatted = warnings.formatwarning

    def formatwarning(*args: Any, **kwargs: Any) -> str:
        return redact(formatted(*args, **kwargs))

    warnings.formatwarning = formatwarning
