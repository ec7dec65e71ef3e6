"""Signal handlers of this process: a process that it forks gets those from before the first of them.

A forked process is the user's, for example of a callback. With a handler of the training, ``Process.terminate()`` would
do nothing there, and the end of a ``multiprocessing.Pool`` would wait forever.
"""

import atexit
import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

from trainwright.base.terminal import guarded

_replaced: dict[int, list[Any]] = {}  # by signal: the handlers that ours have replaced, the first one first
_of_parent: dict[int, Any] = {}  # in a forked process: the handlers that it gets
_forking = threading.local()  # ``mask``: the signals that the thread blocks, without those that a fork blocks


def set_handler(number: int, handler: Any) -> None:
    """Handle a signal in this process until :func:`restore_handler`."""
    _replaced.setdefault(number, []).append(signal.signal(number, handler))


def restore_handler(number: int) -> None:
    """Undo the last :func:`set_handler` of this process."""
    if _replaced.get(number):
        signal.signal(number, _known(_replaced[number].pop()))


def quiet_interrupt(text: str = "") -> KeyboardInterrupt:
    """The error of a Ctrl-C, to be raised where the user has read how to continue.

    If nothing catches it, the program ends without a traceback, and by SIGINT itself: a loop of a shell around it ends,
    too, and the shell's code is 130.
    """
    error, hook = KeyboardInterrupt(text), sys.excepthook

    def on_uncaught(kind: Any, value: BaseException, traceback: Any) -> None:
        if value is not error:
            hook(kind, value, traceback)
        elif not hasattr(sys, "ps1"):  # the prompt of Python continues
            atexit.register(_end_by_sigint)

    sys.excepthook = on_uncaught
    return error


def _end_by_sigint() -> None:
    """End the process by SIGINT, after all functions of atexit.

    Python ends so after a KeyboardInterrupt, unless such a function compiles a text, as one of torch does: then with 1.
    """
    atexit.unregister(_end_by_sigint)
    atexit._run_exitfuncs()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        guarded(stream).flush()
    end_by_sigint()


def end_by_sigint() -> None:
    """End the process by SIGINT, at once."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.raise_signal(signal.SIGINT)


def _block() -> None:
    # Python forgets what a forked process receives before it runs: Process.terminate() at once would be lost. An
    # exception in _restore_in_child would be lost too, so that a SIGINT cannot wait for it.
    waiting = [number for number, handlers in _replaced.items() if handlers and number != signal.SIGINT]
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, waiting)


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _restore_in_child() -> None:
    for number, handlers in _replaced.items():
        if handlers:
            _of_parent[number] = _known(handlers[0])
            # SIGTERM also ends a process that runs code of C, where no handler of Python is called.
            signal.signal(number, _of_parent[number] if number == signal.SIGTERM else _handle_in_child)
    _replaced.clear()
    _unblock()


def _handle_in_child(number: int, frame: FrameType | None) -> None:
    torch_data = sys.modules.get("torch.utils.data")
    if torch_data is not None and torch_data.get_worker_info() is not None:
        return  # A terminal sends Ctrl-C to the workers of a loader, too: the training needs them until it has saved.
    signal.signal(number, _of_parent[number])
    signal.raise_signal(number)


def _known(handler: Any) -> Any:
    return signal.SIG_DFL if handler is None else handler  # None: code of C has set it


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_block, after_in_parent=_unblock, after_in_child=_restore_in_child)
