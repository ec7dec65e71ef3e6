"""The stack of another thread, while it runs."""

import faulthandler
import os
import tempfile
from typing import IO


def stack_of(thread: int) -> list[str]:
    """The frames of a thread, the innermost first: ``File "/project/train.py", line 3 in main``; at most 100.

    ``thread``: of ``threading.get_ident()``. [] if it does not run, or if it is not among 100 threads.

    faulthandler writes them: to follow ``f_back`` from ``sys._current_frames()`` while the thread runs has crashed
    Python 3.11 (a segmentation fault in ``PyFrame_GetBack``).
    """
    try:
        with _memory_file() as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    for part in text.split("\n\n"):
        head, *frames = part.strip().splitlines() or [""]
        if f"0x{thread:016x}" in head:
            return [line.strip() for line in frames]
    return []


def _memory_file() -> IO[bytes]:
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("stacks"), "w+b")
    return tempfile.TemporaryFile()
