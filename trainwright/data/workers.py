"""Worker processes: their random numbers, the signals they outlive, and their end."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from types import FrameType
from typing import Any

from torch.utils.data import get_worker_info

from trainwright.data.reading import BatchReader
from trainwright.data.seeding import WORKER_STREAM, mixed_seed, seed_everything_in_this_process


def init_worker(worker_id: int, *, seed: int, rank: int, user_init: Callable[[int], Any] | None) -> None:
    """What a loader's worker does first. ``user_init(worker_id)`` comes last."""
    _outlive_signals()
    seed_everything_in_this_process(mixed_seed(seed, WORKER_STREAM, rank, worker_id))
    info = get_worker_info()
    if info is not None and isinstance(info.dataset, BatchReader):
        # Worker functions look for their data set here, and the reader is none of theirs. The class is frozen.
        object.__setattr__(info, "dataset", info.dataset.dataset)
    if user_init is not None:
        user_init(worker_id)
    _end_without_trainer()


def _end_without_trainer() -> None:
    """End if the process that trains was killed while this one began.

    From here on torch's worker ends when it gets another parent. One that has another by now would wait for ever.
    """
    parent = multiprocessing.parent_process()
    is_direct = not type(multiprocessing.current_process()).__name__.startswith("ForkServer")
    if parent is not None and is_direct and os.getppid() != parent.pid:
        os._exit(1)


def _outlive_signals() -> None:
    """Leave it to the process that trains when to end.

    A terminal sends Ctrl-C, and a scheduler SIGTERM, to all processes alike. The one that trains goes on to the end of
    its step, or of its evaluation, to save, and needs its workers until then. When it is gone, torch's workers see that
    by themselves.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in ("SIGTERM", "SIGUSR1"):
        if hasattr(signal, name):  # not SIG_IGN, which programs that a data set starts would take over
            signal.signal(getattr(signal, name), _nothing)


def _nothing(signum: int, frame: FrameType | None) -> None: ...


class _Workers:
    """The workers that this process has started and that would make its end wait, for they outlive SIGTERM.

    At exit Python sends SIGTERM to what is left of them and waits. They are killed before that.
    """

    def __init__(self) -> None:
        self._alive: set[BaseProcess] = set()
        self._at_exit: Finalize | None = None

    def add(self, workers: set[BaseProcess]) -> None:
        if self._at_exit is None or not self._at_exit.still_active():  # a forked process begins without finalizers
            self._alive = set()
            self._at_exit = Finalize(None, self._kill, exitpriority=0)
        self._alive = {worker for worker in self._alive if worker.is_alive()} | workers

    def _kill(self) -> None:
        if not self._alive:
            return
        if hasattr(signal, "SIGCHLD"):
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would raise that a worker was killed
        for worker in self._alive:
            worker.kill()


_workers = _Workers()


@contextmanager
def ended_with_this_process() -> Iterator[None]:
    """The worker processes that are started inside end at the latest when this process does."""
    before = set(multiprocessing.active_children())
    yield
    started = set(multiprocessing.active_children()) - before
    for worker in started:
        # Torch's last resort against a worker that has not ended 5 s after it was asked to.
        worker.terminate = worker.kill  # type: ignore[method-assign]
    _workers.add(started)
