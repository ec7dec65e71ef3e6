"""The training loop: hooks around steps."""

import logging
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from traceback import extract_tb
from typing import TYPE_CHECKING, Any

from trainwright.base.errors import ConfigError, ConfigTypeError, UserError, did_you_mean
from trainwright.config.foreign_names import HOOK_METHODS, attribute_hint
from trainwright.data.errors import add_fix
from trainwright.events.phases import PhaseTimes
from trainwright.events.storage import EventStorage
from trainwright.hooks.base import MOMENTS, HookBase, decides_itself, insert_hook
from trainwright.hooks.due import NextCall
from trainwright.hooks.method_overrides import (
    check_methods,
    is_overridden,
    overridable,
    unset_attribute,
    warn_of_misspelt,
)
from trainwright.hooks.signals import STOPS, TrainingPaused
from trainwright.parallel.faults import announce, meet, names_connection, watch_training

logger = logging.getLogger("trainwright.engine")

FILE_ONLY = {"file_only": True}  # a log record that the console skips


@overridable
class TrainerBase:
    """Iterations with hooks around them. A subclass defines an iteration in ``run_step``.

    Attributes:
        iter: the current 0-based iteration. At the end of a training without failure it equals ``max_iter``, after a
            failure it is the failed iteration.
        start_iter, max_iter: the first iteration, and the end (exclusive); a stop lowers it until ``train`` returns.
        iterations_done: updates that the weights have had; a checkpoint saved now continues from there. Between two
            iterations it equals ``iter``, in ``after_step`` it is ``iter + 1``.
        samples_per_iter: samples that one iteration consumes; 0 if unknown.
        samples_done: samples consumed so far, where one consumes a known number (else see ``consumed_samples``).
        storage: the metrics of this training, an :class:`~trainwright.events.EventStorage`.
        phases: the time of each phase of this training, a :class:`~trainwright.events.PhaseTimes`.
        step_seconds: duration of the latest step, without hooks.
        last_eval_results: results of the latest evaluation.
        has_failed: whether the training, or a hook after it, has failed; ``failure``: the class of its error, or None.
            Later hooks can read them.
        stop_reason: what has stopped the training before its end; None: nothing.
        unfinished_stop: the reason and the end, in iterations, of a :meth:`stop`, until the training has ended there. A
            training that continues after a failure ends there, too.
        evaluates_on_start: whether an :class:`~trainwright.hooks.EvalHook` evaluates the initial weights, too.
        called_hooks: the classes of the hooks whose ``after_step`` was called in the latest iteration, if a failure or
            a stop has left out others: a training that continues from there calls these first. None: none is left out.
        is_training: whether ``train`` runs.
        has_trained: whether this object has made steps.
        is_ended: whether the last iteration and every hook's ``after_train`` are done, without a failure.
    """

    storage: EventStorage
    is_copy = False  # True for a copy that a check or a finder trains and discards

    def __init__(self) -> None:
        self._hooks: list[HookBase] = []
        self.iter = self.start_iter = self.max_iter = self.iterations_done = 0
        self.samples_per_iter = self.samples_done = 0
        self.phases = PhaseTimes()
        self.step_seconds = 0.0
        self.is_training = self.has_trained = False
        self.failure: type[BaseException] | None = None
        self.stop_reason: str | None = None
        self.unfinished_stop: tuple[str, int] | None = None
        self._planned_end: int | None = None  # max_iter before a stop
        self.called_hooks: list[str] | None = None
        self._place: int | None = None  # in `_after_step`, of the hook that is being called
        self.is_ended = self.evaluates_on_start = False
        self._stepper: Any = None  # the object that runs the steps; its ``iter`` is updated
        self._before_step: list[Callable[[], None]] = []  # those of hooks that override it
        # With the next call of a hook that may have periods.
        self._after_step: list[tuple[HookBase, Callable[[], None], NextCall | None]] = []
        self._between_steps: list[Callable[[], None]] = []
        self.last_eval_results: dict[str, Any] = {}

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Called for missing attributes only: the message knows the names of other libraries' trainers."""
            text = unset_attribute(self, name, has_begun="_hooks" in vars(self))
            if text is not None:
                raise AttributeError(text, name=name, obj=self)
            here = attribute_hint(name, self)
            if here is not None:
                kind = type(self).__name__
                raise AttributeError(f"{kind} has no attribute {name!r}. Here it is: {here}.", name=name, obj=self)
            return super().__getattribute__(name)  # the usual error

    @property
    def has_failed(self) -> bool:
        return self.failure is not None

    @property
    def consumed_samples(self) -> int:
        """Training samples consumed so far."""
        return self.samples_done

    @property
    def hooks(self) -> tuple[HookBase, ...]:
        """The registered hooks, in the order of their calls."""
        return tuple(self._hooks)

    def register_hooks(self, hooks: Iterable[HookBase | None]) -> None:
        """Add hooks, called in the order of their slots and then of this list; None, for no hook, is ignored."""
        if isinstance(hooks, HookBase):
            raise ConfigTypeError(f"register_hooks: got one hook; pass a list: [{type(hooks).__name__}(...)].")
        if self._stepper is not None:
            raise ConfigError(
                "register_hooks: the steps have begun, and would not call it. Register it before train()."
            )
        for hook in hooks:
            if hook is None:
                continue
            if not isinstance(hook, HookBase):
                is_callback = hasattr(hook, "on_epoch_end")
                hint = "callbacks are added with add_callback(...)" if is_callback else "a hook must be a HookBase"
                if isinstance(hook, type) and issubclass(hook, HookBase):
                    hint = f"pass an object: {hook.__name__}(...)"
                raise ConfigTypeError(f"register_hooks: got {hook!r}; {hint}.")
            check_methods(hook, MOMENTS, "hooks", HOOK_METHODS)
            hook.trainer = weakref.proxy(self)  # a plain reference would make a cycle that outlives the training
            insert_hook(self._hooks, hook)

    def _repr_html_(self) -> str | None:  # what a notebook shows
        from trainwright.engine.folder.summary import html_of

        return html_of(self) if hasattr(self, "run") else None

    def train(self, start_iter: int | None = None, max_iter: int | None = None) -> dict[str, Any]:
        """Run the iterations ``start_iter`` (inclusive) to ``max_iter`` (exclusive); by default the trainer's own.

        Returns the results of the last evaluation. ``after_train`` of every hook runs even after a failure; then the
        error of the training is raised.
        """
        with self._training(start_iter, max_iter) as run_step:
            for _ in self._iterations():
                run_step()
        return self.last_eval_results

    def _iterations(self, until: Callable[[], int] | None = None) -> Iterator[None]:
        """Run hooks before and after each iteration. The caller's loop body runs the step: no frame is added.

        ``until`` returns the iteration to stop before; a later call continues.
        """
        if self.iter >= self.max_iter:
            return  # there may be no storage yet
        stepper, storage, phases, step_end = self._stepper, self.storage, self.phases, time.perf_counter()
        steps, divided = 0.0, phases.step  # seconds
        while self.iter < (self.max_iter if until is None else min(until(), self.max_iter)):
            storage.iter = stepper.iter = self.iter
            self.before_step()
            step_start = time.perf_counter()
            phases.hooks += step_start - step_end
            yield
            step_end = time.perf_counter()
            self.step_seconds = step_end - step_start
            steps += self.step_seconds
            self.iterations_done = self.iter + 1
            self.samples_done += self.samples_per_iter
            storage.samples = self.samples_done
            self.after_step()
            self.iter += 1
        phases.hooks += time.perf_counter() - step_end
        phases.forward += max(0.0, steps - (phases.step - divided))  # time that the steps have not assigned to a phase

    @contextmanager
    def _training(self, start_iter: int | None = None, max_iter: int | None = None) -> Iterator[Callable[[], None]]:
        """The context of one training run: hooks before and after its iterations. Yields the call that runs a step."""
        if self.is_training:
            raise RuntimeError("train() was called while this trainer trains, perhaps from a hook.")
        if not self.has_trained and not self.is_copy:
            warn_of_misspelt(self)
        self._use_settings()
        self.iter = self.start_iter = self.start_iter if start_iter is None else start_iter
        self.max_iter = self.max_iter if max_iter is None else max_iter  # before `_continue`: it may be a longer run
        if self.has_trained and self.iterations_done == self.start_iter:
            self._continue()
        if self.iterations_done != self.start_iter:  # not a continued training
            self.called_hooks = self.unfinished_stop = None
        self.iterations_done = self.start_iter
        self.failure = self.stop_reason = None
        if self.called_hooks is None:
            self._between_steps.clear()
        self._stop_again()
        self.phases = PhaseTimes()
        if self.start_iter > self.max_iter or (self.start_iter == self.max_iter and not self._is_end_pending()):
            logger.info(
                "Nothing to train: %d of %d iterations are done. A larger num_epochs or max_steps (train.train_epoch or"
                " train.train_iter in a config file) trains longer.", self.start_iter, self.max_iter,
            )  # fmt: skip
            yield self.run_step
            return

        self.is_ended, self.is_training = False, True
        with ExitStack() as end, EventStorage(self.start_iter) as self.storage:
            end.callback(self._end_training)  # after the last hook
            try:
                watch_training(self)
                meet("train")
                self.before_train()
                run_step = self.prepare_steps()
                if self.called_hooks is not None:
                    self._finish_iteration()
                yield run_step
                # From here on self.iter == self.max_iter, which shows after_train that no step failed.
                self.storage.reduce()
                self.storage.is_over = True
                self.storage.iter = self._stepper.iter = self.iter
            except TrainingPaused as pause:
                self._after_failure(pause)
                return
            except BaseException as error:
                self._after_failure(error)
                raise
            finally:
                self.has_trained = True
                self._stepper = None  # it may be the trainer itself: avoids a reference cycle
            try:
                self.after_train()
            except TrainingPaused:  # in its final evaluation
                return
            except Exception as error:
                self._explain_missing(error)
                cause = None if isinstance(error, UserError) else error
                logger.error(
                    "Training failed in its last evaluation, save or hook: %s", error, exc_info=cause, extra=FILE_ONLY
                )
                raise

    def prepare_steps(self) -> Callable[[], None]:
        """Restore the state of a resumed run, and return the call that makes a step."""
        self._before_first_step()
        for hook in self._hooks:
            hook.before_first_step()
        hooks = [hook for hook in self._hooks if not hook.is_idle]
        self._before_step = [hook.before_step for hook in hooks if is_overridden(hook, "before_step")]
        self._after_step = [
            (hook, hook.after_step, None if decides_itself(hook) else NextCall(hook.due or ()))
            for hook in hooks
            if is_overridden(hook, "after_step")
        ]
        self._stepper, run_step = self._bind_run_step()
        return run_step

    def steps_before(self, until: int) -> Iterator[Callable[[], None]]:
        """Outside of ``train``: the call that makes a step, once for each iteration before ``until``."""
        call, self.has_trained = self.prepare_steps(), True
        try:
            for _ in self._iterations(lambda: until):
                yield call
        finally:
            self._stepper = None

    def run_step(self) -> None:
        """One iteration: one update of the weights."""
        raise NotImplementedError(f"{type(self).__name__} must define an iteration in run_step.")

    def before_train(self) -> None:
        """Call every hook's ``before_train``."""
        for hook in self._hooks:
            hook.before_train()

    def before_step(self) -> None:
        """Finish the previous iteration, and call every hook's ``before_step``. Override it to do more."""
        while self._between_steps:
            self._between_steps.pop(0)()
        # A train() of the user's own plans no calls.
        for call in self._before_step if self._stepper is not None else [hook.before_step for hook in self._hooks]:
            call()

    def after_step(self) -> None:
        """Call the ``after_step`` of every hook that is due. Override it to do more."""
        if self._stepper is None:  # in a train() of the user's own, which plans no calls
            for hook in self._hooks:
                hook.after_step()
            return
        done = self.iterations_done
        for place, (hook, call, next_call) in enumerate(self._after_step):
            due = hook.due
            if next_call is not None and due is not None:
                if due is not next_call.due:
                    next_call.follow(due)
                # In most iterations no call is needed to know that a hook is not due.
                is_new = done >= self.max_iter or next_call.results is not self.last_eval_results
                if not (is_new or next_call.at <= done):
                    continue
                self._place = place
                if not next_call.has_come(self):
                    continue
            self._place = place
            call()
        self._place = None

    def _finish_iteration(self) -> None:
        """Call the hooks that the failure or stop of an earlier training has left out after its last iteration."""
        hooks, called = self._after_step, list(self.called_hooks or ())
        self._after_step = []
        for one in hooks:
            if (name := type(one[0]).__name__) in called:
                called.remove(name)
            else:
                self._after_step.append(one)
        self.iter -= 1  # if one of them fails again, it is this iteration that has failed
        self.storage.iter = self._stepper.iter = self.iter
        self.after_step()
        self.iter, self.called_hooks, self._after_step = self.iter + 1, None, hooks

    def stop(self, reason: str, *, error: BaseException | None = None) -> None:
        """End the training after the current iteration, as after its last one: with the final evaluation and save.

        Before the first iteration, as in ``before_train``, a training that is resumed ends without one, and a new run
        after one. Outside of a training, nothing happens. With several processes, each of them calls it in the same
        iteration; the flags of a callback need only one.

        Args:
            reason: for the log, the summary and ``run.json``.
            error: raised at once: the training is interrupted, and a resume continues it. What has happened since the
                last save is lost, so that callers save first.
        """
        if error is not None:
            self.stop_reason = reason
            raise error
        if not self.is_training or self._planned_end is not None:
            return
        has_begun = self._stepper is not None
        end = self.iter + (has_begun or self.iter == 0)
        if end >= self.max_iter:
            return
        self._stop_after(reason, end)
        if has_begun:
            self.storage.reduce()  # the last row is written now
        if end > self.iter and not self.is_copy:
            logger.info("Stopping after iteration %d: %s.", end, reason)

    def _stop_again(self) -> None:
        """End where an earlier training, which this one continues, was stopped before it failed."""
        stop, self.unfinished_stop = self.unfinished_stop, None
        if stop is None:
            return
        reason, end = stop
        if self.start_iter < end < self.max_iter or (end == self.start_iter and self._is_end_pending()):
            self._stop_after(reason, end)

    def _stop_after(self, reason: str, end: int) -> None:
        self.stop_reason, self.unfinished_stop = reason, (reason, end)
        self._planned_end, self.max_iter = self.max_iter, end

    def plan_end(self, max_iter: int) -> None:
        """Set the end of the training; if it is being stopped, of the next one."""
        if self._planned_end is None:
            self.max_iter = max_iter
        else:
            self._planned_end = max_iter

    def call_between_steps(self, call: Callable[[], None]) -> None:
        """Call ``call`` once, before the next iteration begins: every hook has finished this one then.

        Not called at the end of a training.
        """
        self._between_steps.append(call)

    def plan_calls(self) -> None:
        """Compute again when hooks are due: a period, or the length of the run, has changed."""
        for _, _, next_call in self._after_step:
            if next_call is not None:
                next_call.forget()

    def after_train(self) -> None:
        """Call every hook's ``after_train``, then every hook's ``after_end``, even if one of them fails.

        Raises the first failure at the end.
        """
        first_error: BaseException | None = None
        for moment in ("after_train", "after_end"):
            for hook in self._hooks:
                try:
                    getattr(hook, moment)()
                except BaseException as error:  # other hooks may have data to save
                    self.failure = self.failure or type(error)
                    if first_error is None:
                        first_error = error
                    else:
                        # A full disk, for example, is met by each hook that writes: its message names the file.
                        trace = None if isinstance(error, OSError) else error
                        name = f"{moment} of {type(hook).__name__}"
                        logger.error("%s failed as well: %s", name, error, exc_info=trace)
            self.is_ended = not self.has_failed
            if self.is_ended:
                self.unfinished_stop = None
        if first_error is not None:
            self._set_exit_code(first_error)
            announce(first_error)
        watch_training(None)
        if first_error is not None:
            raise first_error

    def _bind_run_step(self) -> tuple[Any, Callable[[], None]]:
        """The object that runs the steps, whose ``iter`` is updated, and the call that makes a step; resolved once."""
        return self, self.run_step

    def _end_training(self) -> None:
        self.is_training = False
        if self._planned_end is not None:
            self.max_iter, self._planned_end = self._planned_end, None

    def _is_end_pending(self) -> bool:
        """Whether a run was killed after its last iteration; then only the ``after_train`` hooks run."""
        return self.called_hooks is not None

    def _use_settings(self) -> None:
        """Called first: the settings may have been changed."""

    def _continue(self) -> None:
        """Called before a training that starts where this trainer is, perhaps at the end of an earlier ``train()``."""

    def _before_first_step(self) -> None:
        """Called last before the first iteration, when every hook is ready."""

    def _set_exit_code(self, error: BaseException) -> None:
        if isinstance(error, UserError) and self.iterations_done > self.start_iter:
            error.exit_code = 1  # 2 means that nothing was trained

    def _explain_missing(self, error: BaseException) -> None:
        """Add a note to an error of reading ``storage.latest()`` or ``last_eval_results``, which are plain dicts."""
        if type(error) is not KeyError or not error.args:
            return
        name, line = str(error.args[0]), extract_tb(error.__traceback__)[-1].line or ""
        known = self.storage.histories_so_far()
        if ".latest()[" in line and name not in known:
            hint = did_you_mean(name, known) if known else "Nothing has been put yet."
            later = f"A result of an evaluation is there after the first one: storage.latest().get({name!r})."
            error.add_note(f"storage.latest() has no {name!r} now. {hint} {later}")
        if "last_eval_results[" in line and name not in (results := self.last_eval_results):
            hint = did_you_mean(name, map(str, results)) if results else "Nothing has been evaluated yet."
            error.add_note(f"last_eval_results has no {name!r}. {hint}")

    def _after_failure(self, error: BaseException) -> None:
        self.failure = type(error)  # not the error, whose frames hold tensors
        if self.iterations_done > self.iter and self._place is not None:  # the one that has failed is called again
            called = [type(hook).__name__ for hook, _, _ in self._after_step[: self._place]]
            self.called_hooks = [*(self.called_hooks or ()), *called]
        self._place = None
        if isinstance(error, RuntimeError | MemoryError) and not self.is_copy:
            from trainwright.engine.out_of_memory import add_memory_note, is_out_of_memory

            if is_out_of_memory(error):
                add_memory_note(error, self)
        if str(error).startswith("DataLoader worker"):  # raised by a handler of a signal, anywhere
            add_fix(error)
        if isinstance(error.__cause__, StopIteration):  # Python's own message names no place
            error.add_note("A hook or the step called next() on an iterator that has ended: see the first traceback.")
        self._explain_missing(error)
        self._set_exit_code(error)
        announce(error)
        # Only for log.txt: the caller of train() reports the error.
        if isinstance(error, STOPS):
            logger.info("Training was stopped in iteration %d.", self.iter + 1, extra=FILE_ONLY)
        else:
            cause = None if isinstance(error, UserError) else error
            logger.error("Training failed in iteration %d: %s", self.iter + 1, error, exc_info=cause, extra=FILE_ONLY)
        self.storage.iter = max(
            self.start_iter, self.iterations_done - 1
        )  # later writes belong to the last completed iteration
        try:
            self.after_train()
        except Exception as later:
            if names_connection(error) and names_connection(later):  # a background save failed for the same reason
                logger.error("after_train: %s", later, extra=FILE_ONLY)
            else:
                trace = None if isinstance(later, OSError) else later
                logger.error("after_train failed too (%s); the error of the training follows.", later, exc_info=trace)
