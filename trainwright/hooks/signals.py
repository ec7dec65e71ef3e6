"""Handle signals and failed background saves between two iterations, on all ranks at the same one."""

import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from types import FrameType
from typing import Any

from trainwright.base import dist
from trainwright.base.notebook import is_kernel
from trainwright.base.signal_handlers import restore_handler, set_handler
from trainwright.checkpoint.checkpointer import Checkpointer
from trainwright.events.writers.progress import live_bars
from trainwright.hooks.base import HookBase

logger = logging.getLogger("trainwright.hooks")

_STOPPING = (signal.SIGTERM, signal.SIGINT)
_SAVING: tuple[signal.Signals, ...] = (signal.SIGUSR1,) if hasattr(signal, "SIGUSR1") else ()
_STOPS = "Stopping after this iteration; press Ctrl-C again to end at once."
_STOPS_CELL = "Stopping after this iteration; interrupt again to end at once."
_MAX_ITERATIONS_APART = 1000
_active: list["Interruptions"] = []  # hooks of the running trainings, the innermost last


class TrainingTerminated(SystemExit):
    """SIGTERM was received, and the training is saved. Exit code 143, the shells' code for SIGTERM."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)


class TrainingPaused(Exception):  # noqa: N818  # not an error: ``train`` returns
    """The time of the training is over, and the training is saved. Ends ``train`` without an error."""


# What ends a training without a fault; GeneratorExit: `break` in a TrainingLoop.
STOPS = (KeyboardInterrupt, SystemExit, GeneratorExit, TrainingPaused)


def _interrupted(text: str = "") -> KeyboardInterrupt:
    """To be raised where the log says how to continue: Python prints no traceback of it."""
    error, hook = KeyboardInterrupt(text), sys.excepthook
    sys.excepthook = lambda kind, value, traceback: None if value is error else hook(kind, value, traceback)
    return error


def max_time_of(settings: Any) -> float | None:
    if settings.max_time is None:
        return None
    from trainwright.config.validation import seconds_of  # here: loads pydantic

    return seconds_of(settings.max_time)


def stopped_by_signals() -> AbstractContextManager[None]:
    """A context that SIGTERM and SIGINT end at once, in a single-process training that handles signals."""
    return _active[-1].stopping_at_once() if _active and dist.get_world_size() == 1 else nullcontext()


def stopped_between_batches() -> AbstractContextManager[None]:
    """A context in which SIGTERM and SIGINT end an evaluation before its next batch, in a single-process training that
    handles signals. The training is saved, and a resume evaluates."""
    if not _active or dist.get_world_size() > 1:
        return nullcontext()
    from trainwright.evaluation.loop import watched_batches

    return watched_batches(_active[-1].until_stopped)


class Interruptions(HookBase):
    """SIGTERM and SIGINT: finish the iteration, save, and stop. SIGUSR1: save, and continue.

    SIGTERM ends the training with :class:`TrainingTerminated`, SIGINT (Ctrl-C) with KeyboardInterrupt. A second SIGINT
    ends the process at once. Signals that the program ignores stay ignored. Outside the main thread, where Python
    allows no signal handlers, none are handled.

    In a training of one process they also stop the evaluation of an iteration, before its next batch: it changes no
    weights, and a resume makes it. After the last iteration, they stop the final evaluation at once: the training is
    saved, and a resume evaluates. Everything else is finished: a signal of the last iteration that finds no evaluation
    ends nothing, and ``train`` returns a complete run.

    A save that has failed in the background is repeated with the current state; if that fails too, the training ends.

    One process checks every iteration. Several processes exchange their signals every ``period_s`` seconds, at an
    iteration that all know in advance, so a signal to one process suffices.

    Args:
        save: saves the current training state, named by the last completed iteration.
        resume: what a user sets to continue, for messages.
        max_time_s: after this time, counted from ``before_train``, save and end the training: ``train`` returns. Or a
            function, which returns it at the start of each training.
            Several processes end at the same iteration, when the first of them has trained so long.
    """

    slot = "stop"
    in_copies, ends_run = False, True

    def __init__(
        self,
        checkpointer: Checkpointer,
        save: Callable[[], None],
        *,
        resume: str = "a resume",
        period_s: float = 1.0,
        max_time_s: float | Callable[[], float | None] | None = None,
    ) -> None:
        self._checkpointer = checkpointer
        self._save = save
        self._resume = resume
        self._period_s = period_s
        self._max_time_s = max_time_s
        self._limit_s: float | None = None  # of the current training
        self._end = math.inf  # time in seconds
        self._received: set[int] = set()
        self._handled: list[int] = []
        self._stops_at_once = self._has_stopped_evaluation = False
        self._is_alone = True
        self._next_check = 0  # iteration
        self._last_check: tuple[int, float] = (0, 0.0)  # iteration, time in seconds

    def before_train(self) -> None:
        self._received.clear()
        self._has_stopped_evaluation = False
        _active.append(self)
        self._limit_s = self._max_time_s() if callable(self._max_time_s) else self._max_time_s
        self._end = math.inf if self._limit_s is None else time.perf_counter() + self._limit_s
        if threading.current_thread() is threading.main_thread():
            for number in (*_STOPPING, *_SAVING):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    set_handler(number, self._handle)
                    self._handled.append(number)
        self._is_alone = dist.get_world_size() == 1
        self._next_check = self.trainer.start_iter + 1
        self._last_check = (self.trainer.start_iter, time.perf_counter())

    def before_step(self) -> None:
        if not self._is_alone:
            self._check_together()
            return
        if self._received or self._checkpointer.has_failed():
            self._act(self._received)
        if time.perf_counter() >= self._end and self.trainer.iter > self.trainer.start_iter:
            self._pause()

    def after_train(self) -> None:
        if self._has_stopped_evaluation and self.trainer.has_failed:  # after every hook has ended
            self._save_for(self._received.copy())

    def after_end(self) -> None:
        if self in _active:
            _active.remove(self)
        while self._handled:
            restore_handler(self._handled.pop())

    @contextmanager
    def stopping_at_once(self) -> Iterator[None]:
        """The context is ended by SIGTERM and SIGINT at once, also by one received before."""
        self._stops_at_once = True
        try:
            self._stop(self._received)
            yield
        except (TrainingTerminated, KeyboardInterrupt):
            text = "%s: the final evaluation is stopped. The training is saved; %s evaluates."
            logger.info(text, self.trainer.stop_reason, self._resume)
            raise
        finally:
            self._stops_at_once = False

    def until_stopped(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The batches of an evaluation within the training; a signal ends it before the next one."""
        for batch in batches:
            self._has_stopped_evaluation = bool(self._received.intersection(_STOPPING))
            self._stop(self._received)
            yield batch

    def _stop(self, received: Collection[int], text: str = "") -> None:
        """End the training, if one of the received signals does."""
        stopping = [number for number in _STOPPING if number in received]
        if stopping:
            error = TrainingTerminated() if stopping[0] == signal.SIGTERM else _interrupted(text)
            self.trainer.stop(stopping[0].name, error=error)

    def _check_together(self) -> None:
        iteration = self.trainer.iter
        if iteration < self._next_check:
            return
        before, then = self._last_check
        now = time.perf_counter()
        apart = round(self._period_s * (iteration - before) / max(now - then, 1e-6))
        apart = min(max(1, apart), 2 * max(1, iteration - before), _MAX_ITERATIONS_APART)
        is_over = now >= self._end and iteration > self.trainer.start_iter
        known = (*_STOPPING, *_SAVING)
        apart, has_failed, is_over, *signals = dist.largest(
            apart if dist.is_main_process() else 0,
            self._checkpointer.has_failed(),
            is_over,
            *(number in self._received for number in known),
        )
        self._last_check, self._next_check = (iteration, now), iteration + apart
        received: set[int] = {number for number, is_received in zip(known, signals, strict=True) if is_received}
        if received or has_failed:
            self._act(received)
        if is_over:
            self._pause()

    def _pause(self) -> None:
        self._save_progress()
        text = "max_time: %s have passed; stopped after iteration %d; %s continues the training."
        logger.info(text, timedelta(seconds=self._limit_s or 0), self.trainer.iterations_done, self._resume)
        self.trainer.stop("max_time", error=TrainingPaused())

    def _save_progress(self) -> bool:
        """Save, unless the checkpoint that this run resumed from is current; returns whether it was trained."""
        self._wait_for_saves()
        is_trained = bool(self.trainer.iterations_done > self.trainer.start_iter)
        if is_trained:
            self._save()
            self._checkpointer.wait()
        return is_trained

    def _act(self, received: set[int]) -> None:
        """``received``: the signals of all ranks."""
        received = set(received)
        self._received -= received
        if not received:
            self._wait_for_saves()
            return
        self._stop(received, self._save_for(received))

    def _save_for(self, received: set[int]) -> str:
        """Save, and log what comes then; returns it."""
        is_trained = self._save_progress()
        names = ", ".join(signal.Signals(number).name for number in sorted(received))
        what = f"saved after iteration {self.trainer.iterations_done}" if is_trained else "nothing was trained yet"
        is_stopped = received.intersection(_STOPPING)
        then = f"stopped; {self._resume} continues from there" if is_stopped else "continuing"
        logger.info("%s: %s; %s.", names, what, then)
        return f"{what}; {then}."

    def _wait_for_saves(self) -> None:
        """Wait for pending saves. If one has failed, save the current state; a second failure is raised."""
        try:
            self._checkpointer.wait()
        except OSError as error:
            logger.warning("%s. Retrying with the current state.", error)
            self._save()
            self._checkpointer.wait()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._stops_at_once:
            self._received.add(number)
            self._stop(self._received)
            return
        if number == signal.SIGINT:
            # The second one ends a program, and a cell of a notebook: the kernel keeps its variables.
            signal.signal(signal.SIGINT, signal.default_int_handler if is_kernel() else signal.SIG_DFL)
            notice = _STOPS_CELL if is_kernel() else _STOPS
            if live_bars:
                live_bars[0].notice = notice  # its thread shows it: printing needs a lock that this thread may hold
            else:
                os.write(2, f"\n{notice}\n".encode())  # async-signal-safe
        self._received.add(number)
