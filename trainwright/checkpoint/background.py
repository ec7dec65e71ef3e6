"""Work beside the training: one thread, tasks one after the other, and a failure kept until somebody asks for it."""

import contextlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class Background:
    """Runs tasks in a thread of its own, in the order given. After one has failed, those behind it are not run.

    The thread ends with `close`, or when this object is not used any more and its tasks are done. Python does not end
    before the tasks have.
    """

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None
        self._tasks: list[Future[None]] = []
        self._failure: BaseException | None = None
        self._thread: int | None = None

    def submit(self, task: Callable[[], object]) -> Callable[[], None]:
        """Run ``task`` when those before it are done; returns what waits for it.

        Where Python is about to end and starts no thread any more, it is run here and now.
        """
        if self._executor is None:
            # Not a method of this object: the thread would keep that, and with it itself, for ever.
            self._executor = ThreadPoolExecutor(1, "trainwright-save", initializer=_leave_the_processor_to_others)
        self._tasks = [earlier for earlier in self._tasks if not earlier.done()]
        try:
            submitted = self._executor.submit(self._run, task)
        except RuntimeError:
            self.wait()
            self._run(task)
            self._thread = None
            return lambda: None
        self._tasks.append(submitted)
        return submitted.result

    def is_busy(self) -> bool:
        """Whether a task is running or to be run."""
        return any(not task.done() for task in self._tasks)

    def has_failed(self) -> bool:
        """Whether `raise_failure` would raise. Costs nothing to ask at every step."""
        return self._failure is not None

    def wait(self) -> None:
        """Return when no task is left; at once within a task, which cannot wait for itself. Failures are kept."""
        if threading.get_ident() != self._thread:
            for task in self._tasks:
                task.result()

    def raise_failure(self) -> None:
        """Raise what a task has failed with, once."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Wait, and end the thread; a later `submit` starts another one."""
        self.wait()
        if self._executor is not None and threading.get_ident() != self._thread:
            self._executor.shutdown()
            self._executor, self._tasks = None, []

    def _run(self, task: Callable[[], object]) -> None:
        self._thread = threading.get_ident()
        if self._failure is not None:
            return
        try:
            task()
        except BaseException as error:  # whatever it is, the training hears of it
            self._failure = error


def _leave_the_processor_to_others() -> None:
    """The training comes first where there are not enough processors for both. On Linux a thread has its own rank."""
    if hasattr(os, "setpriority"):
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
