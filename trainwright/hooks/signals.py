"""Signals, and saves that failed beside the training: acted on between two iterations, by all ranks at the same one."""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import Any, Protocol

from trainwright.hooks.base import HookBase
from trainwright.parallel.dist import all_gather_object, get_world_size

logger = logging.getLogger("trainwright.hooks")

_STOPPING = (signal.SIGTERM, signal.SIGINT)
_SAVING: tuple[signal.Signals, ...] = (signal.SIGUSR1,) if hasattr(signal, "SIGUSR1") else ()
_MAX_ITERATIONS_APART = 1000
_active: list["Interruptions"] = []  # of the trainings that run, the innermost last


class TrainingTerminated(SystemExit):
    """SIGTERM came, and what was trained is saved. Ends the process with 143, what shells give for SIGTERM."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)


def stopped_by_signals() -> AbstractContextManager[None]:
    """What runs inside is ended by SIGTERM and SIGINT at once, where a training of one process looks at signals."""
    return _active[-1].stopping_at_once() if _active and get_world_size() == 1 else nullcontext()


class Saver(Protocol):
    """What this hook needs of a :class:`~trainwright.checkpoint.Checkpointer`."""

    def has_failed(self) -> bool: ...

    def wait(self) -> None: ...


class Interruptions(HookBase):
    """SIGTERM and SIGINT: finish the iteration, save, and stop. SIGUSR1: save, and go on.

    SIGTERM ends the training by :class:`TrainingTerminated`, SIGINT (Ctrl-C) by KeyboardInterrupt. A second SIGINT ends
    the process at once, as it would without this hook; checkpoints are whole at every moment. Signals that the program
    was started to ignore stay ignored, and outside of the main thread, where Python lets nobody handle signals, all are
    left alone.

    After the last iteration the final evaluation of an :class:`~trainwright.hooks.EvalHook` is stopped at once, in a
    training of one process: the training is saved, and a resume evaluates. Everything else is finished, and so is the
    final evaluation of several processes.

    A save that has failed in the background is made once more, with the state of now; if that fails too, it ends the
    training.

    It stands last in the list, behind what saves by itself. One process looks at every iteration. Several agree: each
    ``period_s`` seconds they tell each other what has come, at an iteration that all know beforehand, so that a signal
    to one of them is enough.

    Args:
        save: saves what was trained so far, under the name of the last iteration done.
    """

    def __init__(self, checkpointer: Saver, save: Callable[[], None], *, period_s: float = 1.0) -> None:
        self._checkpointer = checkpointer
        self._save = save
        self._period_s = period_s
        self._came: set[int] = set()
        self._previous: dict[int, Any] = {}
        self._stops_at_once = False
        # Functions of the class: a bound method would make a circle that outlives the training.
        self._look: Callable[[Interruptions], None] = Interruptions._look_alone
        self._next_look = 0  # iteration
        self._last_look: tuple[int, float] = (0, 0.0)  # iteration, time in seconds

    def before_train(self) -> None:
        self._came.clear()
        _active.append(self)
        if threading.current_thread() is threading.main_thread():
            for number in (*_STOPPING, *_SAVING):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._note)
        if get_world_size() > 1:
            self._look = Interruptions._look_together
            self._next_look = self.trainer.start_iter + 1
            self._last_look = (self.trainer.start_iter, time.perf_counter())

    def before_step(self) -> None:
        self._look(self)

    def _look_alone(self) -> None:
        if self._came or self._checkpointer.has_failed():
            self._act(self._came)

    def after_end(self) -> None:
        if self in _active:
            _active.remove(self)
        while self._previous:
            signal.signal(*self._previous.popitem())

    @contextmanager
    def stopping_at_once(self) -> Iterator[None]:
        """What runs inside is ended by SIGTERM and SIGINT at once, also by one that came before."""
        self._stops_at_once = True
        try:
            self._stop()
            yield
        except (TrainingTerminated, KeyboardInterrupt) as stop:
            name = "SIGTERM" if isinstance(stop, TrainingTerminated) else "SIGINT"
            logger.info("%s: the final evaluation is stopped. The training is saved; a resume evaluates.", name)
            raise
        finally:
            self._stops_at_once = False

    def _stop(self) -> None:
        if self._came.intersection(_STOPPING):
            raise TrainingTerminated if signal.SIGTERM in self._came else KeyboardInterrupt

    def _look_together(self) -> None:
        iteration = self.trainer.iter
        if iteration < self._next_look:
            return
        before, then = self._last_look
        now = time.perf_counter()
        apart = round(self._period_s * (iteration - before) / max(now - then, 1e-6))
        apart = min(max(1, apart), 2 * max(1, iteration - before), _MAX_ITERATIONS_APART)
        seen = all_gather_object((self._came.copy(), self._checkpointer.has_failed(), apart))
        self._last_look, self._next_look = (iteration, now), iteration + seen[0][2]
        came = set[int]().union(*(signals for signals, _, _ in seen))
        if came or any(has_failed for _, has_failed, _ in seen):
            self._act(came)

    def _act(self, came: set[int]) -> None:
        """``came``: the signals that all ranks have agreed on."""
        came = set(came)
        self._came -= came
        self._settle()
        if not came:
            return
        is_trained = self.trainer.iterations_done > self.trainer.start_iter
        if is_trained:  # else the checkpoint that this run has come from says it all
            self._save()
            self._checkpointer.wait()
        stopping = [number for number in _STOPPING if number in came]
        names = ", ".join(signal.Signals(number).name for number in sorted(came))
        what = f"saved after iteration {self.trainer.iterations_done}" if is_trained else "nothing was trained yet"
        logger.info("%s: %s; %s.", names, what, "stopping, a resume goes on from there" if stopping else "going on")
        if stopping:
            raise TrainingTerminated if stopping[0] == signal.SIGTERM else KeyboardInterrupt

    def _settle(self) -> None:
        """Wait for the saves in flight. Where one has failed, save what there is now; failing again is raised."""
        try:
            self._checkpointer.wait()
        except OSError as error:
            logger.warning("%s. Trying once more, with the state of now.", error)
            self._save()
            self._checkpointer.wait()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._stops_at_once:
            self._came.add(number)
            self._stop()
            return
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.write(2, b"\nStopping after this iteration; Ctrl-C again ends at once.\n")  # all that a handler may do
        self._came.add(number)
