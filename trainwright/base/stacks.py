"""The stacks of other threads, while they run."""

import gc
import operator
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import accumulate, chain, repeat, starmap
from types import CodeType

_MAX_FRAMES = 100
_lock = threading.Lock()


def stack_of(thread: int) -> list[str]:
    """The frames of a thread, the innermost first: ``File "/project/train.py", line 3 in main``; at most 100.

    ``thread``: of ``threading.get_ident()``. [] if it does not run.
    """
    return [f'File "{code.co_filename}", line {line} in {code.co_name}' for code, line in _calls_of(thread)]


def all_stacks() -> Iterator[tuple[str, list[str]]]:
    """The name and the stack of each thread that runs Python code."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for thread in sys._current_frames():
        yield names.get(thread, f"thread {thread}"), stack_of(thread)


def _calls_of(thread: int) -> deque[tuple[CodeType, int]]:
    """The code and the line of each frame of a thread.

    The frames must not change while they are followed: to follow ``f_back`` in a loop has crashed Python 3.11 (a
    segmentation fault in ``PyFrame_GetBack``), and so has faulthandler, which reads the states of threads that C++ code
    is about to add. So one call of a C function reads all frames: no bytecode runs within it, after which another
    thread could continue, and no garbage collection, which calls functions in Python. (From 3.12 on, a collection
    waits for the next bytecode.)
    """
    calls = deque[tuple[CodeType, int]]()
    first = map(operator.itemgetter(thread), starmap(sys._current_frames, [()]))
    frames = accumulate(chain(first, repeat("f_back", _MAX_FRAMES - 1)), getattr)
    with _no_collection(), suppress(KeyError, AttributeError):  # there is no such thread; the last f_back is None
        calls.extend(map(operator.attrgetter("f_code", "f_lineno"), frames))
    return calls


@contextmanager
def _no_collection() -> Iterator[None]:
    with _lock:  # or another thread that looks would enable it within this block
        if sys.version_info >= (3, 12) or not gc.isenabled():
            yield
            return
        gc.disable()
        try:
            yield
        finally:
            gc.enable()
