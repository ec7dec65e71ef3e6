"""The error file of a process that torchrun started: which process failed first, and with what."""

import contextlib
import json
import os
import sys
import time
from pathlib import Path
from types import TracebackType

from trainwright.base.terminal import shortened

_FILE = "TORCHELASTIC_ERROR_FILE"  # torchrun sets it, in a folder for each process of a host


def text_of(error: BaseException) -> str:
    return shortened(f"{type(error).__name__}: {error}")


def write_error_file(error: BaseException) -> None:
    """Let torchrun name this process as the root cause."""
    if path := os.environ.get(_FILE):
        # The earliest error is the cause, in whole seconds: others may end in this one, without a file.
        about = {"py_callstack": f"{text_of(error)} (above)", "timestamp": str(int(time.time()) - 1)}
        with contextlib.suppress(OSError), open(path, "x", encoding="utf-8") as file:  # the first error is the cause
            json.dump({"message": {"message": text_of(error), "extraInfo": about}}, file)


def is_reported(error: BaseException) -> bool:
    """Write the error file; return whether another process of this host has reported the same error before.

    Each process writes before it reads, so of several exactly the first one finds no earlier file.
    """
    write_error_file(error)
    own = Path(os.environ.get(_FILE, ""))
    with contextlib.suppress(OSError, ValueError, LookupError):
        mine = own.stat().st_mtime_ns, own.parent.name
        for other in own.parent.parent.glob(f"*/{own.name}") if _FILE in os.environ else ():
            is_earlier = (other.stat().st_mtime_ns, other.parent.name) < mine
            if is_earlier and json.loads(other.read_text(encoding="utf-8"))["message"]["message"] == text_of(error):
                return True
    return False


def report_errors() -> None:
    """Report an uncaught error of this process, which torchrun has started; of equal ones only the first is printed.

    After the processes have met, :mod:`trainwright.parallel.faults` does.
    """
    if sys.excepthook is not _print_first:
        _print_first.other, sys.excepthook = sys.excepthook, _print_first  # type: ignore[attr-defined]


def _print_first(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not (issubclass(kind, Exception) and is_reported(error)):
        _print_first.other(kind, error, trace)  # type: ignore[attr-defined]
