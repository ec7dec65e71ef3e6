"""Callbacks on a training: which moment of the loop calls which of their methods, and what becomes of their wishes."""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from trainwright.checkpoint.checkpointer import Checkpointer
from trainwright.config.errors import ConfigError
from trainwright.evaluation.report import flatten_results_dict
from trainwright.events.storage import EventStorage
from trainwright.hooks.base import HookBase
from trainwright.hooks.callbacks.control_requests import TrainerControl, Wishes
from trainwright.hooks.callbacks.logs import EpochMean, Logs
from trainwright.hooks.callbacks.sequence import CallbackList
from trainwright.hooks.checkpoint import has_failed
from trainwright.parallel.dist import get_world_size

logger = logging.getLogger("trainwright.hooks")

_Results = Mapping[str, Any] | None


class RunCallbacks(HookBase):
    """Call a :class:`CallbackList` from a training.

    | moment | calls |
    |---|---|
    | ``before_train`` | ``set_*``, ``on_train_begin``; then, of a resumed training, ``load_state_dict`` |
    | ``before_step`` | at the start of an epoch ``on_epoch_begin`` |
    | a batch is fetched from :meth:`train_batches` | ``on_train_batch_begin`` |
    | the next one is, or ``after_step`` | ``on_train_batch_end`` |
    | a function that :meth:`evaluating` gave is called | ``on_eval_begin`` … ``on_eval_end`` |
    | a batch is fetched from :meth:`eval_batches` | ``on_eval_batch_begin``, and at the next ``on_eval_batch_end`` |
    | ``after_step``, ``after_train`` | at the end of an epoch ``on_epoch_end`` |
    | ``after_end`` | ``on_train_end`` |

    It stands behind the hooks that evaluate and step the schedule, and before those that save at the end of training.
    Without :meth:`train_batches` an iteration is one batch, and callbacks get ``()`` for it.

    With several processes each calls its own callbacks. A wish of one of them is everybody's, and granted after an
    evaluation or at the end of an epoch; a save between these must be wished by all of them alike.

    Args:
        steps_per_epoch: in batches; None: the whole training is one epoch.
        save: what ``should_save`` calls, with the Checkpointer to save by. By default ``model_{iter:07d}`` is saved.
        evaluate, log, end_epoch: what ``should_evaluate``, ``should_log`` and ``should_epoch_stop`` call; without,
            such a wish is an error.
        metric: which result of an evaluation is ``eval_epoch_metric``; by default the first that is not the loss.
        loss_name: the metric in the storage that is ``step_loss``, where :meth:`record` gets no other.

    Attributes:
        callbacks, control, logs: what they are given.
    """

    def __init__(
        self,
        callbacks: CallbackList,
        control: TrainerControl | None = None,
        *,
        steps_per_epoch: int | None = None,
        save: Callable[[Checkpointer], None] | None = None,
        evaluate: Callable[[], object] | None = None,
        log: Callable[[], object] | None = None,
        end_epoch: Callable[[], object] | None = None,
        metric: str | None = None,
        loss_name: str = "total_loss",
    ) -> None:
        if steps_per_epoch is not None and steps_per_epoch < 1:
            raise ConfigError(f"RunCallbacks.steps_per_epoch: got {steps_per_epoch}; it must be None or at least 1.")
        self.callbacks = callbacks
        self.control = TrainerControl() if control is None else control
        self.logs = Logs()
        self._steps_per_epoch = steps_per_epoch
        actions = {"should_epoch_stop": end_epoch, "should_evaluate": evaluate, "should_log": log}
        self._wishes = Wishes(self.control, self._save_iteration if save is None else save, actions)
        self._metric = metric
        self._mean_loss = EpochMean(loss_name)
        self._epoch: int | None = None  # the one that has begun and not ended
        self._is_entered = False  # whether on_epoch_begin was called for it, in this process
        self._is_train_begun = False
        self._is_shown = False  # the storage's loss, which is there after the first update
        self._is_alone = True  # the only process
        self._is_fed = False  # by train_batches
        self._batch: tuple[Any, ...] = ()  # a training batch that has begun, and
        self._eval_batch: tuple[Any, ...] = ()  # one of evaluation
        self._evaluated_at: int | None = None  # iterations done then
        self._results: _Results = None

    # What a trainer hands in.

    def train_batches(self, batches: Iterable[Any]) -> Iterator[Any]:
        """``batches``, each with its callbacks around it."""
        self._is_fed = True
        return self._watched(batches)

    def eval_batches(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The batches of an evaluation, each with its callbacks around it."""
        for batch in batches:
            self._eval_batch = (batch,)
            self.callbacks.on_eval_batch_begin(batch, self.logs)
            yield batch
            self._end_eval_batch()

    def evaluating(self, evaluate: Callable[[], _Results]) -> Callable[[], _Results]:
        """``evaluate``, with its callbacks around it: what an :class:`~trainwright.hooks.EvalHook` takes.

        The evaluation at the end of a training that has just been stopped after one is that one, and not run again.
        """
        return partial(self._evaluate, evaluate)

    def record(self, step_logs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Show callbacks what a step has given (``step_loss``, ``epoch_loss`` …; tensors are waited for when read)."""
        self.logs.update(step_logs)
        return step_logs

    def epoch_loss(self) -> float:
        """The mean loss of the epoch so far."""
        return self._mean_loss.read(self.trainer.storage)

    def epoch_loss_with(self, step_loss: float) -> float:
        """The mean loss of the epoch so far, with that of a step which is not over."""
        return self._mean_loss.read_with(self.trainer.storage, step_loss)

    # The moments.

    def before_train(self) -> None:
        trainer, control = self.trainer, self.control
        control.reset()
        self._batch = self._eval_batch = ()
        self._epoch, self._is_entered, self._is_shown, self._evaluated_at = None, False, False, None
        steps_done = getattr(getattr(trainer, "state", None), "global_step", trainer.start_iter)
        self.logs["global_step"] = steps_done
        self.logs["eval_global_step"] = self.logs.get("eval_global_step", 0)
        self.logs["epoch"] = self._epoch_of(max(0, steps_done - 1))
        self._mean_loss.begin(trainer.start_iter)
        optimizer = getattr(trainer, "optimizer", None)
        if optimizer is not None:  # asked for anew each time: a callback may set another one
            self.logs.defer("lr", lambda: float(trainer.optimizer.param_groups[0]["lr"]))
        self.callbacks.set_model(getattr(trainer, "model", None))
        self.callbacks.set_optimizer(optimizer)
        self.callbacks.set_trainercontrol(control)
        self._is_alone = get_world_size() == 1
        self._is_train_begun = True
        self.callbacks.collect()
        self.callbacks.on_train_begin(self.logs)

    def before_step(self) -> None:
        if self.control.should_save:
            self._wishes.save(self._checkpointer())
        if not self._is_entered:
            self._enter_epoch()
        if not self._is_fed:
            self._begin_batch(())

    def after_step(self) -> None:
        self._end_batch()
        is_over = self._epoch is not None and self._epoch_of(self.logs["global_step"]) > self._epoch
        is_last = is_over and self.trainer.iter + 1 >= self.trainer.max_iter
        if is_over and not is_last:  # the last epoch is over when the final evaluation has been
            self._leave_epoch()
        if self._is_alone:
            self._wishes.grant(self.trainer)
        elif is_over or self._evaluated_at == self.trainer.iterations_done:
            self._wishes.agree()
            self._wishes.grant(self.trainer)

    def after_train(self) -> None:
        if self._is_train_begun and not has_failed(self.trainer):
            if self._epoch is not None:
                self._leave_epoch()
            self._wishes.agree()

    def after_end(self) -> None:
        if not self._is_train_begun:
            return
        self._is_train_begun = False
        self.control.has_failed = has_failed(self.trainer)
        try:
            if not self.control.has_failed:
                self._wishes.save(self._checkpointer())
        finally:
            try:
                self.callbacks.on_train_end(self.logs)
            finally:
                self._wishes.wait(alone=self.control.has_failed)

    # What a resume brings back.

    def state_dict(self) -> dict[str, Any]:
        mean_loss = self._mean_loss.state_dict(self.trainer.storage)
        return {
            "epoch": self._epoch,
            "logs": self.logs.numbers(),
            "mean_loss": mean_loss,
            **self.callbacks.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Also ends a training that its callbacks had stopped, and still want stopped, before the first step."""
        self._epoch = state["epoch"]
        self.logs.update(state["logs"])
        self._mean_loss.load_state_dict(state["mean_loss"])
        self.callbacks.load_state_dict(state)
        if self.control.should_training_stop:
            logger.info(
                "Nothing to train: a callback stopped the run after iteration %d. After early stopping, a larger"
                " patience or early_stopping=None continues it.", self.trainer.iter,
            )  # fmt: skip
            self.trainer.max_iter = self.trainer.iter

    # Batches, epochs, evaluations.

    def _watched(self, batches: Iterable[Any]) -> Iterator[Any]:
        for batch in batches:
            self._begin_batch(batch)
            yield batch
            self._end_batch()  # of a micro-batch inside a window; the last one of a window has been ended

    def _begin_batch(self, batch: Any) -> None:
        self._batch = (batch,)
        self.callbacks.on_train_batch_begin(batch, self.logs)

    def _end_batch(self) -> None:
        if not self._batch:
            return
        (batch,), self._batch = self._batch, ()
        if not self._is_shown and self.trainer.iterations_done > self.trainer.start_iter:
            self._show_storage()
        self.logs.count("global_step", "epoch_step")
        self.callbacks.on_train_batch_end(_as_tuple(batch), self.logs)

    def _end_eval_batch(self) -> None:
        if not self._eval_batch:
            return
        (batch,), self._eval_batch = self._eval_batch, ()
        self.callbacks.on_eval_batch_end(_as_tuple(batch), self.logs)
        self.logs.count("eval_global_step")

    def _epoch_of(self, steps_before: int) -> int:
        return 1 if self._steps_per_epoch is None else int(steps_before) // self._steps_per_epoch + 1

    def _enter_epoch(self) -> None:
        self._is_entered = True
        epoch = self._epoch_of(self.logs["global_step"])
        # A checkpoint from before the last evaluation has the last epoch open; a longer run that resumes it goes on.
        if self._epoch is None or self._epoch < epoch:
            self._epoch = epoch
            self.logs["epoch_step"] = self.logs["global_step"] - (epoch - 1) * (self._steps_per_epoch or 0)
            self._mean_loss.begin(self.trainer.iter)
        self.logs["epoch"] = self._epoch
        self.callbacks.on_epoch_begin(self._epoch, self.logs)

    def _leave_epoch(self) -> None:
        epoch, self._epoch, self._is_entered = self._epoch, None, False
        assert epoch is not None
        self.callbacks.on_epoch_end(epoch, self.logs)

    def _evaluate(self, evaluate: Callable[[], _Results]) -> _Results:
        done = self.trainer.iterations_done
        if self._is_train_begun and self.control.should_training_stop and self._evaluated_at == done:
            return self._results
        self._end_batch()
        self.callbacks.on_eval_begin(self.logs)
        self._results = evaluate()
        self._end_eval_batch()
        self._evaluated_at = done
        if isinstance(self._results, Mapping):  # anything else the hook that asked for it refuses
            self.logs.update(self._named(flatten_results_dict(self._results)))
        self.callbacks.on_eval_end(self.logs)
        return self._results

    def _named(self, results: Mapping[str, Any]) -> dict[str, Any]:
        """An evaluation's results, by the names that callbacks know."""
        named = {f"eval_{name}": value for name, value in results.items()}
        if "loss" in results:
            named["eval_epoch_loss"] = results["loss"]
        metric = self._metric or next((name for name in results if name != "loss"), None)
        if metric is not None and metric in results:
            named["eval_epoch_metric"] = results[metric]
        return named

    def _checkpointer(self) -> Checkpointer | None:
        return getattr(self.trainer, "checkpointer", None)

    def _show_storage(self) -> None:
        """Let callbacks read the loss that the trainer puts."""
        self._is_shown = True
        storage, name = self.trainer.storage, self._mean_loss.name
        if name in storage.smoothing_hints():
            self.logs.defer("step_loss", lambda: storage.history(name).latest())
            self.logs.defer("epoch_loss", lambda: self._epoch_loss(storage))

    def _epoch_loss(self, storage: EventStorage) -> float:
        mean = self._mean_loss.read(storage)
        is_first_window = math.isnan(mean) and "step_loss" in self.logs  # no update of this epoch is done
        return float(self.logs["step_loss"]) if is_first_window else mean

    def _save_iteration(self, checkpointer: Checkpointer) -> None:
        iteration = self.trainer.iterations_done - 1
        checkpointer.save(f"model_{iteration:07d}", iteration=iteration)


def _as_tuple(batch: Any) -> Any:
    return tuple(batch) if isinstance(batch, list) else batch
