"""Calls callbacks at the moments of a training, and applies their requests."""

import logging
import math
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from trainwright.base import dist
from trainwright.base.dist import all_gather_object, get_world_size, is_any
from trainwright.base.errors import ConfigError
from trainwright.checkpoint.checkpointer import Checkpointer
from trainwright.checkpoint.folder import numbered_name
from trainwright.evaluation.evaluator import flatten_results_dict
from trainwright.events.epoch_means import RunningMean
from trainwright.events.storage import mean_so_far
from trainwright.hooks.base import HookBase, has_failed
from trainwright.hooks.callbacks.base import CallbackList, TrainerControl
from trainwright.hooks.callbacks.logs import Logs

logger = logging.getLogger("trainwright.hooks")

_REQUESTS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")
_LOSS = "total_loss"  # in the storage
_STOP_REASON = "a callback has set should_training_stop"
_Results = Mapping[str, Any] | None


class RunCallbacks(HookBase):
    """Calls a :class:`CallbackList` from a training.

    | moment | calls |
    |---|---|
    | ``before_train`` | ``set_*``, ``on_train_begin``; then, of a resumed training, ``load_state_dict`` |
    | ``before_step`` | at the start of an epoch ``on_epoch_begin`` |
    | :meth:`begin_batch` | ``on_train_batch_begin`` |
    | :meth:`end_batch`, or ``after_step`` | ``on_train_batch_end`` |
    | a function that :meth:`evaluating` gave is called | ``on_eval_begin`` … ``on_eval_end`` |
    | a batch is fetched from :meth:`eval_batches` | ``on_eval_batch_begin``, and at the next ``on_eval_batch_end`` |
    | ``after_step``, ``after_train`` | at the end of an epoch ``on_epoch_end`` |
    | ``after_end`` | ``on_train_end`` |

    Unless ``is_fed`` is set, an iteration is one batch, and callbacks get ``()`` for it.

    With several processes each calls its own callbacks. A request of one process applies to all: where ``is_due``,
    after an evaluation or at the end of an epoch. To save between these, all of them must request it.

    Args:
        is_optional: without any callback it is idle.
        early_stopping: the name of this setting, for messages.
        steps_per_epoch: in batches; None: the complete training is one epoch.
        epoch_at: in place of it, for epochs of different lengths: returns the number, from 0, of the epoch of the batch
            that follows so many batches, and the batches before that epoch.
        save: called for ``should_save``, with the Checkpointer to use. By default ``model_{iter:07d}`` is saved.
        evaluate, log, end_epoch: called for ``should_evaluate``, ``should_log`` and ``should_epoch_stop``; without
            them, such a request is an error.
        is_due: whether several processes share their requests after this iteration; the same on all of them.
        late: calls that callbacks make within an update, and that are due after it.
        eval_is_due: whether an evaluation is due after this iteration; by default at each end of an epoch.
        steps_done: the batches trained on before this training; by default one for each earlier iteration.

    Attributes:
        callbacks, control, logs: the passed callbacks, their control and their logs.
        is_fed: whether ``begin_batch`` is called for each batch; set before the first.
    """

    slot = "evaluate"

    def __init__(
        self,
        callbacks: CallbackList,
        control: TrainerControl | None = None,
        *,
        steps_per_epoch: int | None = None,
        epoch_at: Callable[[int], tuple[int, int]] | None = None,
        save: Callable[[Checkpointer], None] | None = None,
        evaluate: Callable[[], object] | None = None,
        log: Callable[[], object] | None = None,
        end_epoch: Callable[[], object] | None = None,
        is_due: Callable[[], int] | None = None,
        late: list[Callable[[], object]] | None = None,
        eval_is_due: Callable[[], int] | None = None,
        steps_done: Callable[[], int] | None = None,
        is_optional: bool = False,
        early_stopping: str = "early_stopping",
    ) -> None:
        if steps_per_epoch is not None and steps_per_epoch < 1:
            raise ConfigError(f"RunCallbacks.steps_per_epoch: got {steps_per_epoch}; it must be None or at least 1.")
        self.callbacks = callbacks
        self.control = TrainerControl() if control is None else control
        self._is_optional, self.is_idle = is_optional, is_optional and not len(callbacks)
        self._early_stopping = early_stopping
        self.logs = Logs()
        per_epoch = steps_per_epoch or sys.maxsize
        self._epoch_at = epoch_at or (lambda steps: (steps // per_epoch, steps // per_epoch * per_epoch))
        self._save_by = self._save_iteration if save is None else save
        self._actions = {"should_epoch_stop": end_epoch, "should_evaluate": evaluate, "should_log": log}
        self._checkpointers: dict[str, Checkpointer] = {}  # for folders other than the run's own
        self._is_due: Callable[[], int] = (lambda: False) if is_due is None else is_due
        self._eval_is_due = eval_is_due
        self._steps_done: Callable[[], int] = (lambda: self.trainer.start_iter) if steps_done is None else steps_done
        self._shares_requests = False  # several processes, of which one has callbacks
        self._mean_loss = RunningMean()
        self._epoch: int | None = None  # the epoch that has started and not ended
        self._cut_epoch: int | None = None  # the one within which a run has ended, which a longer run continues
        self._is_entered = False  # whether this process has called on_epoch_begin for it
        self._is_train_begun = False
        self._is_shown = False  # whether logs reads the stored loss, which exists after the first update
        self._is_alone = True  # the only process
        self.is_fed = False
        self._late = [] if late is None else late
        self._batches = deque[Any]()  # the training batches that have begun and not ended
        self._batches_done = 0  # training batches that have ended
        self._has_recorded = False  # what belongs to the first of them
        self._losses: list[Any] = []  # of the current update, so far
        self._eval_batch: tuple[Any, ...] = ()  # the current evaluation batch
        self._evaluated_at: int | None = None  # iterations_done at the last evaluation
        self._results: _Results = None

    @property
    def may_change_data(self) -> bool:
        return any(callback.may_change_data for callback in self.callbacks)

    # Called by a trainer.

    def begin_batch(self, batch: Any) -> None:
        """A batch has been read, which its step trains on next; ``end_batch`` or ``after_step`` follows."""
        if self.callbacks.sees_batches:
            self._batches.append(batch)
            self.callbacks.on_train_batch_begin(batch, self.logs)
        else:
            self._batches.append(())

    def end_batch(self) -> None:
        """The oldest batch that has begun and not ended ends; ``after_step`` does this for the last of an iteration."""
        if not self._batches:
            return
        batch, self._has_recorded = self._batches.popleft(), False
        if not self._is_shown and (self._losses or self.trainer.iterations_done > self.trainer.start_iter):
            self._show_storage()
        self._batches_done += 1
        self.logs.count("global_step", "epoch_step")
        self.callbacks.on_train_batch_end(tuple(batch) if isinstance(batch, list) else batch, self.logs)

    def eval_batches(self, batches: Iterable[Any]) -> Iterator[Any]:
        for batch in batches:
            self._eval_batch = (batch,)
            self.callbacks.on_eval_batch_begin(batch, self.logs)
            yield batch
            self._end_eval_batch()

    def evaluating(self, evaluate: Callable[[], _Results]) -> Callable[[], _Results]:
        """``evaluate`` with callbacks around it: the function for an :class:`~trainwright.hooks.EvalHook`.

        If an evaluation has just stopped the training, the final one returns None: the results are stored already.
        """
        return partial(self._evaluate, evaluate)

    def record(self, step_logs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Update the logs with a step's values (``step_loss``, ``epoch_loss`` …); reading a tensor synchronizes."""
        self.logs.update(step_logs)
        loss = step_logs.get("step_loss")
        if loss is not None:
            self._losses.append(loss.detach().clone() if isinstance(loss, Tensor) else loss)
        return step_logs

    def next_batch(self) -> None:
        """The next :meth:`record` belongs to the next of the batches that are read at once: end the one before it."""
        if self._has_recorded:
            self.end_batch()
        self._has_recorded = True

    def current_results(self) -> dict[str, Any]:
        """The results of an evaluation of the current weights, if there was one."""
        is_current = self._evaluated_at is not None and self._evaluated_at == self.trainer.iterations_done
        return dict(self._results or {}) if is_current else {}

    def epoch_loss(self, *running: float) -> float:
        """The mean loss of the epoch so far, with that of a running step."""
        return mean_so_far(self.trainer.storage, _LOSS, self._mean_loss, *running)

    def epoch_loss_of_all(self) -> float:
        """The mean over all processes, equal on each of them."""
        losses = all_gather_object(self.epoch_loss())
        return float(sum(losses) / len(losses))

    # Hook methods.

    def before_train(self) -> None:
        trainer, control = self.trainer, self.control
        control.reset()
        self._batches.clear()
        self._losses.clear()
        self._late.clear()
        self._has_recorded, self._eval_batch = False, ()
        self._epoch, self._is_entered, self._is_shown, self._evaluated_at = None, False, False, None
        steps_done = self._batches_done = self._steps_done()
        self.logs["global_step"] = steps_done
        self.logs["eval_global_step"] = self.logs.get("eval_global_step", 0)
        self.logs["epoch"] = self._epoch_of(max(0, steps_done - 1))
        self._mean_loss.begin(trainer.start_iter)
        optimizer = getattr(trainer, "optimizer", None)
        if optimizer is not None:  # read each time: a callback may set another one
            self.logs.defer("lr", lambda: float(trainer.optimizer.param_groups[0]["lr"]))
        self.callbacks.set_model(getattr(trainer, "model", None))
        self.callbacks.set_optimizer(optimizer)
        self.callbacks.set_trainercontrol(control)
        self.callbacks.set_trainer(trainer)
        self._is_alone = get_world_size() == 1
        has_callbacks = is_any(len(self.callbacks) > 0)
        self._shares_requests, self.is_idle = (
            not self._is_alone and has_callbacks,
            self._is_optional and not has_callbacks,
        )
        self._is_train_begun = True
        self.callbacks.collect()
        self.callbacks.on_train_begin(self.logs)

    def before_first_step(self) -> None:
        if _LOSS in self.trainer.storage.smoothing_hints():  # of a resumed training
            self._show_storage()
        if self.trainer.called_hooks is None and self.trainer.start_iter < self.trainer.max_iter:
            return
        # Hooks are called before a step: this one perhaps for the last iteration, whose batches it has not ended then.
        self._batches.extend([()] * int(self._steps_done() - self.logs["global_step"]))
        self._show_storage()

    def before_step(self) -> None:
        if self.control.should_save or self._late:
            self._save()
        if not self._is_entered:
            self._enter_epoch()
        if not self.is_fed:
            self.begin_batch(())

    def after_step(self) -> None:
        self._losses.clear()  # their mean is stored now
        if self.callbacks.sees_batches or not self._is_shown:
            self._end_batches()
        else:
            number, self._has_recorded = len(self._batches), False
            self._batches.clear()
            self._batches_done += number
            self.logs.count("global_step", "epoch_step", by=number)
        is_over = self._epoch is not None and self._epoch_at(self._batches_done)[0] >= self._epoch
        is_last = is_over and self.trainer.iter + 1 >= self.trainer.max_iter
        if self.trainer.iter + 1 >= self.trainer.max_iter:
            self.control.is_extra_evaluation = not (is_over if self._eval_is_due is None else self._eval_is_due())
        if is_over and not is_last:  # the last epoch ends after the final evaluation
            self._leave_epoch()
        if self._is_alone:
            control = self.control
            is_requested = control.should_epoch_stop or control.should_evaluate or control.should_log
            if is_requested or control.should_training_stop:
                self._apply_requests()
        elif (
            is_over or self._evaluated_at == self.trainer.iterations_done or (self._shares_requests and self._is_due())
        ):
            self._share_requests()
            self._apply_requests()

    def after_train(self) -> None:
        if self._is_train_begun and not has_failed(self.trainer):
            if self._epoch is not None:
                is_over = self._epoch_at(self._batches_done)[0] >= self._epoch
                self._cut_epoch, self.control.is_cut_epoch = None if is_over else self._epoch, not is_over
                self._leave_epoch()
            self._share_requests()
            self.control.should_training_stop, self.control.stop_reason = False, ""  # it has ended

    def after_end(self) -> None:
        if not self._is_train_begun:
            return
        self._is_train_begun = False
        self.control.has_failed = has_failed(self.trainer)
        try:
            if not self.control.has_failed:
                self._save()
        finally:
            try:
                self.callbacks.on_train_end(self.logs)
            finally:
                for checkpointer in self._checkpointers.values():
                    checkpointer.wait(alone=self.control.has_failed)

    def before_save(self) -> None:
        """Share the requests that are not applied yet: a checkpoint has the state of one process, for all of them."""
        if self._shares_requests and self._is_train_begun:
            self._share_requests()
            if self.control.should_training_stop:
                self.control.stop_reason = self._reason_of_all()

    # State of a resume.

    def state_dict(self) -> dict[str, Any]:
        own = {"epoch": self._epoch, "cut_epoch": self._cut_epoch, "logs": self.logs.numbers()}
        names = ("should_training_stop", *self._actions)
        requests = {
            "requests": [name for name in names if getattr(self.control, name)],
            "stop_reason": self.control.stop_reason,
        }
        self.epoch_loss()  # adds the newest values
        mean_loss = {"mean_loss": self._mean_loss.state_dict()}
        return {**own, **requests, **mean_loss, **self.callbacks.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Also ends a training before the first step if its callbacks have stopped it and still request that."""
        self._epoch, self._cut_epoch = state["epoch"], state.get("cut_epoch")
        self.logs.update(state["logs"])
        self._batches_done = int(self.logs["global_step"])
        self._mean_loss.load_state_dict(state["mean_loss"])
        self.callbacks.load_state_dict(state)
        if self.control.should_training_stop and self.trainer.called_hooks is None:
            logger.info(
                "Nothing to train: a callback stopped the run after iteration %d. After early stopping, a larger"
                " patience or %s=None continues it.", self.trainer.iter, self._early_stopping,
            )  # fmt: skip
            self._stop(self.control.stop_reason)
        for name in state.get("requests", ()):  # those that have not been applied
            setattr(self.control, name, True)
        self.control.stop_reason = self.control.stop_reason or state.get("stop_reason", "")

    # Batches, epochs, evaluations.

    def _end_batches(self) -> None:
        while self._batches:
            self.end_batch()

    def _end_eval_batch(self) -> None:
        if not self._eval_batch:
            return
        (batch,), self._eval_batch = self._eval_batch, ()
        self.callbacks.on_eval_batch_end(tuple(batch) if isinstance(batch, list) else batch, self.logs)
        self.logs.count("eval_global_step")

    def _epoch_of(self, steps_before: int) -> int:
        return self._epoch_at(int(steps_before))[0] + 1

    def _enter_epoch(self) -> None:
        self._is_entered = True
        epoch = self._epoch_of(self.logs["global_step"])
        # A checkpoint from before the last evaluation has the last epoch open; a longer run continues it.
        if self._epoch is None or self._epoch < epoch:
            self._epoch = epoch
            done = self.logs["global_step"]
            self.logs["epoch_step"] = done - self._epoch_at(int(done))[1]
            if epoch != self._cut_epoch:
                self._mean_loss.begin(self.trainer.iter)
        self._cut_epoch = None
        self.logs["epoch"] = self._epoch
        self.callbacks.on_epoch_begin(self._epoch, self.logs)

    def _leave_epoch(self) -> None:
        epoch, self._epoch, self._is_entered = self._epoch, None, False
        assert epoch is not None
        try:
            self.callbacks.on_epoch_end(epoch, self.logs)
        except BaseException:  # it is repeated, if the training continues
            self._epoch = epoch
            raise

    def _evaluate(self, evaluate: Callable[[], _Results]) -> _Results:
        done = self.trainer.iterations_done
        is_evaluated = self._evaluated_at == done and not any(hook.changes_final_weights for hook in self.trainer.hooks)
        if is_evaluated and self._is_train_begun and self.trainer.stop_reason is not None:
            return None  # they are stored, and in a row
        self._end_batches()
        num_batches = self.logs.get("eval_global_step", 0)
        try:
            self.callbacks.on_eval_begin(self.logs)
            self._results = evaluate()
        except BaseException:  # it is repeated
            self.logs["eval_global_step"] = num_batches
            raise
        self._end_eval_batch()
        self._evaluated_at = done
        if isinstance(self._results, Mapping):  # the hook raises for anything else
            self.logs.update(named_results(flatten_results_dict(self._results)))
        self.callbacks.on_eval_end(self.logs)
        return self._results

    def _show_storage(self) -> None:
        """Make the stored loss readable in the logs."""
        self._is_shown = True
        storage = self.trainer.storage
        if self._losses or _LOSS in storage.smoothing_hints():
            self.logs.defer("step_loss", lambda: storage.latest().get(_LOSS, (math.nan,))[0])
            self.logs.defer("epoch_loss", self._epoch_loss)

    def _epoch_loss(self) -> float:
        mean = self.epoch_loss()
        if not math.isnan(mean):
            return mean
        losses = self._losses or ([self.logs["step_loss"]] if "step_loss" in self.logs else [])
        return sum(map(float, losses)) / len(losses) if losses else mean  # no update of this epoch is complete

    def _save_iteration(self, checkpointer: Checkpointer) -> None:
        iteration = self.trainer.iterations_done - 1
        checkpointer.save(numbered_name(iteration), iteration=iteration)

    # Requests.

    def _share_requests(self) -> None:
        requests = dist.largest(*(bool(getattr(self.control, name)) for name in _REQUESTS))
        for name, is_requested in zip(_REQUESTS, requests, strict=True):
            setattr(self.control, name, bool(is_requested))

    def _apply_requests(self) -> None:
        """Apply every request and clear it, except a save, which :meth:`_save` handles between two iterations."""
        control = self.control
        for name, action in self._actions.items():
            if getattr(control, name):
                setattr(control, name, False)
                if action is None:
                    raise ConfigError(f"A callback has set trainercontrol.{name}; this training does not support it.")
                try:
                    action()
                except BaseException:  # it is repeated, if the training continues
                    setattr(control, name, True)
                    raise
        if control.should_training_stop:
            self._stop(self._reason_of_all())

    def _reason_of_all(self) -> str:
        """The first reason of a process for a stop; all of them call this."""
        reasons = [self.control.stop_reason] if self._is_alone else all_gather_object(self.control.stop_reason)
        return next(filter(None, reasons), "")

    def _stop(self, reason: str) -> None:
        self.control.should_training_stop, self.control.stop_reason = False, ""
        self.trainer.stop(reason or _STOP_REASON)

    def _save(self) -> None:
        while self._late:
            self._late.pop(0)()
        control, own = self.control, getattr(self.trainer, "checkpointer", None)
        if not control.should_save:
            return
        folder, control.should_save, control.save_dir = control.save_dir, False, None
        if own is None:
            raise ConfigError("A callback has set trainercontrol.should_save; this training has no checkpointer.")
        if folder is not None and folder not in self._checkpointers:
            self._checkpointers[folder] = own.in_folder(folder)
        self._save_by(own if folder is None else self._checkpointers[folder])


def named_results(results: Mapping[str, Any]) -> dict[str, Any]:
    """An evaluation's results under the names of callbacks; the metric is the first one that is not ``loss``."""
    first: dict[str, Any] = {}  # of several data sets, those of the first
    for name in results:
        first.setdefault("eval_epoch_loss" if name.rpartition("/")[2] == "loss" else "eval_epoch_metric", results[name])
    return {f"eval_{name}": value for name, value in results.items()} | first
