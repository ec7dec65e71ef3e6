"""Handle signals and failed background saves between two iterations, on all ranks at the same one."""

import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

from trainwright.base import dist
from trainwright.base.agreed_checks import AgreedChecks
from trainwright.base.notebook import runs_cells
from trainwright.base.signal_handlers import quiet_interrupt, restore_handler, set_handler
from trainwright.checkpoint.checkpointer import Checkpointer
from trainwright.checkpoint.verify import inspect_checkpoint
from trainwright.evaluation.stop import stopped_by
from trainwright.events.writers.progress import live_bars
from trainwright.hooks.base import HookBase

logger = logging.getLogger("trainwright.hooks")

_STOPPING = (signal.SIGTERM, signal.SIGINT)
_SAVING: tuple[signal.Signals, ...] = (signal.SIGUSR1,) if hasattr(signal, "SIGUSR1") else ()
_STOPS = "Stopping after this iteration; press Ctrl-C again to end at once."
_STOPS_CELL = "Stopping after this iteration; interrupt again to end at once."
_active: list["Interruptions"] = []  # hooks of the running trainings, the innermost last


class TrainingTerminated(SystemExit):
    """SIGTERM was received, and the training is saved. Exit code 143, the shells' code for SIGTERM."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)


class TrainingPaused(BaseException):
    """The time of the training is over, and the training is saved. Ends ``train`` without an error.

    No ``Exception``, as the other two: no error of an evaluation that it ends, and not for ``except Exception``.
    """


class CellInterrupted(TrainingPaused, KeyboardInterrupt):
    """Ctrl-C in a notebook, and the training is saved: ``train`` returns, so that the next cell runs."""


# What ends a training without a fault; GeneratorExit: `break` in a TrainingLoop.
STOPS = (KeyboardInterrupt, SystemExit, GeneratorExit, TrainingPaused)


def _error_of(number: int, text: str) -> BaseException:
    """What ends a training that is saved after this signal."""
    if number == signal.SIGTERM:
        return TrainingTerminated()
    return CellInterrupted(text) if runs_cells() else quiet_interrupt(text)


def max_time_of(settings: Any) -> float | None:
    if settings.max_time is None:
        return None
    from trainwright.config.validation import seconds_of  # here: loads pydantic

    return seconds_of(settings.max_time)


def evaluation_may_stop(*, is_final: bool = False) -> AbstractContextManager[None]:
    """A context in which SIGTERM, SIGINT and the end of ``max_time`` end an evaluation before its next batch, on all
    ranks at the same one, in a training that handles them. The training is saved, and a resume evaluates.

    ``is_final``: after the last iteration; the training is saved already, and signals to a single process take effect
    at once.
    """
    return _active[-1].stopping_evaluations(is_final) if _active else nullcontext()


class Interruptions(HookBase):
    """SIGTERM and SIGINT: finish the iteration, save, and stop. SIGUSR1: save, and continue.

    SIGTERM ends the training with :class:`TrainingTerminated`, SIGINT (Ctrl-C) with KeyboardInterrupt; in a notebook
    ``train`` returns then. A second SIGINT ends the process at once. Signals that the program ignores stay ignored.
    Outside the main thread, where Python allows no signal handlers, none are handled.

    With one process, an error in the evaluation of an iteration saves, too: the update before it is complete.

    They also stop the evaluation of an iteration, before its next batch: it changes no weights, and a resume makes it.
    After the last iteration, they stop the final evaluation, in a training of one process at once: the training is
    saved, and a resume evaluates. Everything else is finished: a signal of the last iteration that finds no evaluation
    ends nothing, and ``train`` returns a complete run.

    A save that has failed in the background is repeated with the current state; if that fails too, the training ends.

    One process checks every iteration and every batch of an evaluation. Several processes exchange their signals every
    ``period_s`` seconds, at an iteration or a batch that all know in advance, so a signal to one process suffices.

    Args:
        save: saves the current training state, named by the last completed iteration.
        resume: what a user sets to continue, for messages.
        max_time_s: after this time, counted from ``before_train``, save and end the training: ``train`` returns. Or a
            function, which returns it at the start of each training. Each training makes an iteration; an evaluation
            before it is completed.
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
        self._stops_at_once = self._has_stopped_evaluation = self._is_final = False
        self._failed_evaluation = -1  # after so many iterations
        self._is_alone = True
        self._checks = AgreedChecks(0, period_s)  # before iterations

    def before_train(self) -> None:
        self._received.clear()
        self._has_stopped_evaluation, self._failed_evaluation = False, -1
        _active.append(self)
        self._limit_s = self._max_time_s() if callable(self._max_time_s) else self._max_time_s
        self._end = math.inf if self._limit_s is None else time.perf_counter() + self._limit_s
        if threading.current_thread() is threading.main_thread():
            for number in (*_STOPPING, *_SAVING):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    set_handler(number, self._handle)
                    self._handled.append(number)
        self._is_alone = dist.get_world_size() == 1
        self._checks = AgreedChecks(self.trainer.start_iter + 1, self._period_s)

    def before_step(self) -> None:
        if not self._is_alone:
            self._check_together()
            return
        if self._received or self._checkpointer.has_failed():
            self._act(self._received)
        if time.perf_counter() >= self._end and self._has_trained():
            self._pause()

    def after_train(self) -> None:
        if self._has_stopped_evaluation and self.trainer.has_failed:  # after every hook has ended
            if self._received.intersection(_STOPPING):
                self._save_for(self._received.copy())
            else:
                self._save_for_pause()
        elif self.trainer.has_failed and self._has_failed_in_evaluation() and not self._is_saved():
            self._save_progress()

    def _has_failed_in_evaluation(self) -> bool:
        """Whether the update of the iteration that has failed was complete: a later one may be made in part."""
        done = self.trainer.iterations_done
        return bool(self._failed_evaluation == done > self.trainer.iter)

    def _is_saved(self) -> bool:
        """Whether the newest checkpoint is of the last iteration that was made."""
        newest = self._checkpointer.get_checkpoint_file()
        saved = inspect_checkpoint(Path(newest), contents=False).manifest if newest else None
        return saved is not None and saved.iteration == self.trainer.iterations_done - 1

    def after_end(self) -> None:
        if self in _active:
            _active.remove(self)
        while self._handled:
            restore_handler(self._handled.pop())
        if dist.is_main_process() and self._has_trained() and not self._checkpointer.has_failed():
            self._log_what_is_saved()

    def _log_what_is_saved(self) -> None:
        """After an error in the training: from which checkpoint a resume continues."""
        failure = self.trainer.failure
        if failure is None or issubclass(failure, STOPS) or not (newest := self._checkpointer.get_checkpoint_file()):
            return
        done = self.trainer.iterations_done
        logger.info("The training has failed after iteration %d. %s continues from %s.", done, self._resume, newest)

    @contextmanager
    def stopping_evaluations(self, is_final: bool) -> Iterator[None]:
        """A context of evaluations within the training: see :func:`evaluation_may_stop`."""
        self._is_final = is_final
        self._stops_at_once = is_final and self._is_alone
        try:
            if self._stops_at_once:
                self._stop(self._received)
            with nullcontext() if self._stops_at_once and math.isinf(self._end) else stopped_by(self):
                yield
        except STOPS:
            if is_final:
                text = "%s: the final evaluation is stopped. The training is saved; %s evaluates."
                logger.info(text, self.trainer.stop_reason, self._resume)
            raise
        except Exception:  # with several processes, perhaps on one of them only: they could not save together
            if self._is_alone and not is_final:
                self._failed_evaluation = self.trainer.iterations_done
            raise
        finally:
            self._stops_at_once = False

    # What may end an evaluation: `evaluation.stop.StopRequests`.

    def requests(self) -> list[int]:
        received, is_over = self._received, time.perf_counter() >= self._end and self._has_trained()
        return [signal.SIGTERM in received, signal.SIGINT in received, is_over]

    def end_evaluation(self, requests: list[int]) -> None:
        self._received.update(number for number, is_received in zip(_STOPPING, requests, strict=False) if is_received)
        self._has_stopped_evaluation = not self._is_final
        self._stop(self._received)
        self.trainer.stop("max_time", error=TrainingPaused())

    def _stop(self, received: Collection[int], text: str = "") -> None:
        """End the training, if one of the received signals does."""
        stopping = [number for number in _STOPPING if number in received]
        if stopping:
            self.trainer.stop(stopping[0].name, error=_error_of(stopping[0], text))

    def _check_together(self) -> None:
        iteration = self.trainer.iter
        if iteration < self._checks.next:
            return
        known = (*_STOPPING, *_SAVING)
        has_failed, is_over, *signals = self._checks.largest(
            iteration,
            self._checkpointer.has_failed(),
            time.perf_counter() >= self._end and self._has_trained(),
            *(number in self._received for number in known),
        )
        received: set[int] = {number for number, is_received in zip(known, signals, strict=True) if is_received}
        if received or has_failed:
            self._act(received)
        if is_over:
            self._pause()

    def _has_trained(self) -> bool:
        """Whether this training has made an iteration, without which ``max_time`` does not end it."""
        return bool(self.trainer.iterations_done > self.trainer.start_iter)

    def _pause(self) -> None:
        self._save_for_pause()
        self.trainer.stop("max_time", error=TrainingPaused())

    def _save_for_pause(self) -> None:
        self._save_progress()
        text = "max_time: %s have passed; stopped after iteration %d; %s continues the training."
        logger.info(text, timedelta(seconds=self._limit_s or 0), self.trainer.iterations_done, self._resume)

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
        if is_stopped and signal.SIGTERM not in received and runs_cells():
            then += ". In a notebook this is no error, so that the next cell runs"
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
            signal.signal(signal.SIGINT, signal.default_int_handler if runs_cells() else signal.SIG_DFL)
            notice = _STOPS_CELL if runs_cells() else _STOPS
            if live_bars:
                live_bars[0].notice = notice  # its thread shows it: printing needs a lock that this thread may hold
            else:
                os.write(2, f"\n{notice}\n".encode())  # async-signal-safe
        self._received.add(number)
