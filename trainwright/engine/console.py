"""Console logging."""

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
    """Log to the console: everything of rank 0, warnings of the other ranks; above a progress bar, if there is one.

    If the program has configured logging itself (the root logger has a handler), no handler is added. A level that the
    program has set on the logger "trainwright" is kept.
    """
    open_standard_streams()
    library = logging.getLogger("trainwright")
    if library.level == logging.NOTSET:  # else the user has set it
        library.setLevel(logging.INFO)
    logging.getLogger("libai").parent = library  # the name that LiBai's examples log under
    if logging.getLogger().handlers or any(isinstance(h, ProgressAwareHandler) for h in library.handlers):
        return
    handler = ProgressAwareHandler(sys.stdout)
    handler.setFormatter(RedactingFormatter(LOG_FORMAT, datefmt="%H:%M:%S"))
    handler.setLevel(logging.INFO if get_rank() == 0 else logging.WARNING)
    handler.addFilter(lambda record: not getattr(record, "file_only", False))
    library.addHandler(handler)
    _redact_python_output()


@functools.cache  # once per process
def _redact_python_output() -> None:
    """Mask secrets also in warnings, and in log lines of loggers without a handler, which Python prints itself."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(RedactingFormatter())
    formatted = warnings.formatwarning

    def formatwarning(*args: Any, **kwargs: Any) -> str:
        return redact(formatted(*args, **kwargs))

    warnings.formatwarning = formatwarning
