"""The one training loop: hooks around steps."""

import logging
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from trainwright.config.errors import ConfigTypeError, UserError
from trainwright.events.phases import PhaseTimes
from trainwright.events.storage import EventStorage
from trainwright.hooks.base import HookBase
from trainwright.hooks.overrides import is_overridden, overridable

logger = logging.getLogger("trainwright.engine")

FILE_ONLY = {"file_only": True}  # of a log record: not for the console


@overridable
class TrainerBase:
    """Iterations with hooks around them. A subclass says in ``run_step`` what an iteration does.

    Attributes:
        iter: the 0-based iteration that runs. After a training without failure it equals ``max_iter``, after a
            failure it is the iteration that failed.
        start_iter, max_iter: iterations run from the first to before the second.
        iterations_done: updates that the weights have had; a checkpoint taken now goes on from there. Between two
            iterations it is ``iter`` already, in ``after_step`` it is ``iter + 1``.
        samples_per_iter: samples that one iteration consumes; 0 where nobody knows.
        samples_done: samples consumed so far.
        storage: the metrics of this training, an :class:`~trainwright.events.EventStorage`.
        phases: where the time of this training goes, a :class:`~trainwright.events.PhaseTimes`.
        step_seconds: how long the newest step took, without hooks.
        last_eval_results: what the newest evaluation gave.
        has_failed: whether the training, or what a hook does after it, has failed. Hooks that come later see it.
        is_ended: whether the last iteration and every hook's ``after_train`` are done, without a failure.
    """

    storage: EventStorage

    def __init__(self) -> None:
        self._hooks: list[HookBase] = []
        self.iter = self.start_iter = self.max_iter = self.iterations_done = 0
        self.samples_per_iter = self.samples_done = 0
        self.phases = PhaseTimes()
        self.step_seconds = 0.0
        self._is_training = False
        self.has_failed = self.is_ended = False
        self._stepper: Any = None  # who makes the steps, during a training: its ``iter`` is kept up to date
        self.last_eval_results: dict[str, Any] = {}

    def register_hooks(self, hooks: Iterable[HookBase | None]) -> None:
        """Add hooks, to be called in this order. None is left out, so that a hook may be optional in a list."""
        for hook in hooks:
            if hook is None:
                continue
            if not isinstance(hook, HookBase):
                raise ConfigTypeError(f"register_hooks: got {hook!r}; a hook must be a HookBase.")
            hook.trainer = weakref.proxy(self)  # a plain reference would make a circle that outlives the training
            self._hooks.append(hook)

    def train(self, start_iter: int | None = None, max_iter: int | None = None) -> dict[str, Any]:
        """Run the iterations ``start_iter`` (inclusive) to ``max_iter`` (exclusive); by default the trainer's own.

        Returns the results of the last evaluation. Whatever ends the training, ``after_train`` of every hook runs,
        and an error of the training itself is the one that is raised.
        """
        with self._training(start_iter, max_iter) as run_step:
            for _ in self._iterations():
                run_step()
        return self.last_eval_results

    def _iterations(self, until: int | None = None) -> Iterator[None]:
        """The loop: what comes before and after each iteration. Who goes over it makes the step; no frame of this is
        between. ``until``: stop before that iteration, to be called again.
        """
        if self.iter >= self.max_iter:
            return  # there may be no storage
        stepper, before_step, after_step = self._stepper, self._calls_of("before_step"), self._calls_of("after_step")
        storage, phases, step_end = self.storage, self.phases, time.perf_counter()
        steps, divided = 0.0, phases.step  # seconds
        while self.iter < (self.max_iter if until is None else min(until, self.max_iter)):
            storage.iter = stepper.iter = self.iter
            for call in before_step:
                call()
            step_start = time.perf_counter()
            phases.hooks += step_start - step_end
            yield
            step_end = time.perf_counter()
            self.step_seconds = step_end - step_start
            steps += self.step_seconds
            self.iterations_done = self.iter + 1
            self.samples_done += self.samples_per_iter
            storage.samples = self.samples_done
            for call in after_step:
                call()
            self.iter += 1
        phases.hooks += time.perf_counter() - step_end
        phases.forward += max(0.0, steps - (phases.step - divided))  # what no step has told of

    @contextmanager
    def _training(self, start_iter: int | None = None, max_iter: int | None = None) -> Iterator[Callable[[], None]]:
        """A training from its beginning to its end, around its iterations; gives the call that makes a step."""
        if self._is_training:
            raise RuntimeError("train() was called while this trainer trains, from a hook perhaps; let it end first.")
        self.iter = self.start_iter = self.start_iter if start_iter is None else start_iter
        self.iterations_done = self.start_iter
        self.has_failed = self.is_ended = False
        self.max_iter = self.max_iter if max_iter is None else max_iter
        self._stepper, run_step = self._bind_run_step()
        self.phases = self._stepper.phases = PhaseTimes()
        if self.start_iter >= self.max_iter and not self._has_end_to_do():
            logger.info("Nothing to train: %d of %d iterations are done.", self.start_iter, self.max_iter)
            yield run_step
            self._stepper = None
            return

        with EventStorage(self.start_iter) as self.storage:
            try:
                self._is_training = True
                self.before_train()
                self._before_first_step()
                yield run_step
                # self.iter == self.max_iter from here on: it tells after_train that no step failed.
                self.storage.is_over = True
                self.storage.iter = self._stepper.iter = self.iter
            except BaseException as error:
                self._after_failure(error)
                raise
            finally:
                self._is_training = False
                self._stepper = None  # it may be the trainer itself: a circle would outlive the training
            self.after_train()

    def run_step(self) -> None:
        """One iteration: one update of the weights."""
        raise NotImplementedError(f"{type(self).__name__} must say in run_step what an iteration does.")

    def before_train(self) -> None:
        """Call every hook's ``before_train``."""
        for hook in self._hooks:
            hook.before_train()

    def before_step(self) -> None:
        """Call every hook's ``before_step``. Override it to do more."""
        for hook in self._hooks:
            hook.before_step()

    def after_step(self) -> None:
        """Call every hook's ``after_step``. Override it to do more."""
        for hook in self._hooks:
            hook.after_step()

    def after_train(self) -> None:
        """Call every hook's ``after_train``, then every hook's ``after_end``, each of them even if one fails.

        The first failure is raised at the end.
        """
        first_error: BaseException | None = None
        for moment in ("after_train", "after_end"):
            for hook in self._hooks:
                try:
                    getattr(hook, moment)()
                except BaseException as error:  # the other hooks may have something to save
                    self.has_failed = True
                    if first_error is None:
                        first_error = error
                    else:
                        logger.exception("%s of %s failed as well:", moment, type(hook).__name__)
            self.is_ended = not self.has_failed
        if first_error is not None:
            raise first_error

    def _bind_run_step(self) -> tuple[Any, Callable[[], None]]:
        """Who makes the steps (its ``iter`` is kept up to date), and the call that makes one; settled once."""
        return self, self.run_step

    def _has_end_to_do(self) -> bool:
        """Whether the run was killed between its last iteration and its end: then the end is done, without a step."""
        return False

    def _before_first_step(self) -> None:
        """The last thing before the first iteration, when every hook is ready."""

    def _calls_of(self, moment: str) -> list[Callable[[], None]]:
        """What is called at a moment of each step: only hooks that override it, so an absent hook costs nothing."""
        if is_overridden(self, moment):
            return [getattr(self, moment)]  # the user's own method decides
        return [getattr(hook, moment) for hook in self._hooks if is_overridden(hook, moment)]

    def _after_failure(self, error: BaseException) -> None:
        self.has_failed = True
        # For log.txt alone: whoever catches the error shows it.
        if isinstance(error, KeyboardInterrupt | SystemExit):
            logger.info("Training was stopped in iteration %d.", self.iter + 1, extra=FILE_ONLY)
        else:
            cause = None if isinstance(error, UserError) else error
            logger.error("Training failed in iteration %d: %s", self.iter + 1, error, exc_info=cause, extra=FILE_ONLY)
        self.storage.iter = max(
            self.start_iter, self.iterations_done - 1
        )  # what is written now is of the last one done
        try:
            self.after_train()
        except Exception:
            logger.exception("after_train failed too; the error of the training follows.")
