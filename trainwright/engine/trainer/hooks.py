"""Hooks of the Python API: those of config files, but scheduled by steps and epochs."""

import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from trainwright.config.errors import ConfigKeyError, did_you_mean
from trainwright.engine.run_directory import RunFolder, is_left_out
from trainwright.engine.run_files import Layout
from trainwright.engine.trainer.parts import CSV_NAME
from trainwright.events.writers import EventWriter
from trainwright.events.writers.writer_thread import WriterDispatcher
from trainwright.hooks.base import HookBase
from trainwright.hooks.checkpoint import BestCheckpointer, Saver, has_failed, has_failed_at_start
from trainwright.hooks.evaluate import EvalHook
from trainwright.hooks.schedule import LRScheduler
from trainwright.hooks.writers import PeriodicWriter
from trainwright.parallel.dist import get_world_size

if TYPE_CHECKING:
    from trainwright.config.training.training_config import TrainingConfig

logger = logging.getLogger("trainwright.engine")

IsDue = Callable[[], bool]  # called after an update


class Evaluate(EvalHook):
    """Evaluate when due and after the last update. Results are stored under ``evaluation/``."""

    def __init__(self, is_due: IsDue, evaluate: Callable[[], Mapping[str, Any] | None]) -> None:
        super().__init__(0, evaluate)
        self._is_due = is_due

    def after_step(self) -> None:
        if self._is_due() and self.trainer.iter + 1 != self.trainer.max_iter:
            self._evaluate()

    def evaluate_now(self) -> None:
        """Evaluate immediately."""
        self._evaluate()

    def _evaluate(self) -> None:
        with self.trainer.storage.name_scope("evaluation"):
            super()._evaluate()


class ScheduleSteps(LRScheduler):
    """Record the learning rate of each update; step the schedule when it is due, by default after each update.

    The schedule is not stepped if the step has done so itself. Does nothing if the trainer has no schedule.
    """

    _leaves_plateaus = True

    def __init__(self, due_for_this: Callable[[], IsDue | None]) -> None:
        """``due_for_this`` returns when the trainer's current schedule is due; None for after each update."""
        super().__init__()
        self._due_for_this = due_for_this
        self._is_due: IsDue | None = None
        self._position = 0  # of the schedule
        self._is_by_steps = True

    def before_train(self) -> None:
        self._use_scheduler(self.trainer.lr_scheduler)

    def _use_scheduler(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        if scheduler is not None:
            super().before_train()
            self._is_due = self._due_for_this()
            self._position = scheduler.last_epoch
            self._is_by_steps = not isinstance(scheduler, ReduceLROnPlateau)

    def after_step(self) -> None:
        trainer = self.trainer
        scheduler = trainer.lr_scheduler
        if scheduler is not self._scheduler:  # a callback has set another optimizer
            self._use_scheduler(scheduler)
        if scheduler is None:
            return
        trainer.storage.put_scalar("lr", trainer.optimizer.param_groups[self._group]["lr"], smoothing_hint=False)
        if self._is_by_steps and scheduler.last_epoch == self._position and (self._is_due is None or self._is_due()):
            scheduler.step()
        self._position = scheduler.last_epoch


class ReduceOnPlateau(HookBase):
    """Step a ``ReduceLROnPlateau`` with ``read_metric`` after each evaluation, or with ``is_due`` when that is True."""

    def __init__(self, read_metric: Callable[[], float | None], is_due: IsDue | None = None) -> None:
        self._read_metric = read_metric
        self._is_due = self._has_new_results if is_due is None else is_due
        self._seen: object = None

    def before_train(self) -> None:
        self._seen = self.trainer.last_eval_results

    def after_train(self) -> None:
        # Use the final evaluation, as a longer run would at this point.
        if self._is_due == self._has_new_results and not has_failed(self.trainer):
            self.after_step()

    def after_step(self) -> None:
        scheduler = self.trainer.lr_scheduler
        if self._is_due() and isinstance(scheduler, ReduceLROnPlateau) and (value := self._read_metric()) is not None:
            scheduler.step(value)

    def _has_new_results(self) -> bool:
        seen, self._seen = self._seen, self.trainer.last_eval_results
        return self._seen is not seen


class SaveSteps(HookBase):
    """Save a checkpoint named by its step when due and after the last update.

    Saves between updates, after every hook has finished the previous one.
    """

    def __init__(
        self, checkpointer: Saver, is_due: IsDue, save: Callable[..., None], saves_before_end: Callable[[], bool]
    ) -> None:
        """``save`` takes ``keep_trained``, as :meth:`Checkpointer.save` does.

        ``saves_before_end``: whether checkpoints before the last one are due, so that memory is reserved in advance.
        """
        self._checkpointer = checkpointer
        self._saves_before_end = saves_before_end
        self._is_due = is_due
        self._save = save
        self._due: int | None = None  # the update to save
        self._is_prepared = False

    def after_step(self) -> None:
        if self._is_due():
            self._due = self.trainer.iter
        if not self._is_prepared:
            self._is_prepared = True
            with self.trainer.phases.counting("save"):
                self._checkpointer.prepare(reserve=self._saves_before_end())

    def before_step(self) -> None:
        if self._due is not None:
            self._due = None
            self._save_now()

    def after_train(self) -> None:
        is_finished = self.trainer.iter >= self.trainer.max_iter and not has_failed_at_start(self.trainer)
        # Also after a failure behind the update, for example in its evaluation: the update itself is complete.
        is_done = self._due is not None and self.trainer.iterations_done == self._due + 1
        try:
            is_alone = get_world_size() == 1  # after a failure the other processes may not reach this point
            if is_finished or (is_alone and is_done):
                self._save_now()
        finally:
            self._due = None
            with self.trainer.phases.counting("save"):
                self._checkpointer.wait(alone=not is_finished)

    def after_end(self) -> None:
        """Save the last checkpoint again, with the state of hooks that the final evaluation has changed."""
        if not has_failed(self.trainer):
            with self.trainer.phases.counting("save"):
                self._save(keep_trained=True)
                self._checkpointer.wait()

    def _save_now(self) -> None:
        with self.trainer.phases.counting("save"):
            self._save()


class SaveBest(BestCheckpointer):
    """Save ``model_best`` in the checkpoint folder after the best evaluation so far."""

    def __init__(self, is_due: IsDue, checkpointer: Saver, metric: str, mode: str, *, is_needed: bool) -> None:
        """``is_needed``: raise if the metric is missing, because the run's settings need it."""
        super().__init__(0, checkpointer, metric, mode)
        self._is_check_due = is_due
        self._is_needed = is_needed

    def after_step(self) -> None:
        if self._is_check_due() and self.trainer.iter + 1 != self.trainer.max_iter:
            self._check_metric(self.trainer.iter)

    def _check_metric(self, evaluated_at: int) -> None:
        # A training metric belongs to the last update also at the end, where evaluations count one more.
        is_of_training = not self._metric.startswith("evaluation/")
        super()._check_metric(min(evaluated_at, self.trainer.max_iter - 1) if is_of_training else evaluated_at)

    def _warn_missing(self) -> None:
        if not self._is_needed:
            super()._warn_missing()
            return
        known = sorted(self.trainer.last_eval_results)
        name = self._metric.removeprefix("evaluation/")
        raise ConfigKeyError(
            f"TrainingConfig.metric_for_best_model: the evaluation computed no {name!r}, which load_best_model_at_end"
            f" needs. {did_you_mean(name, known)}"
        )


class AtEnd(HookBase):
    """Call ``do`` at the end of a training without failure. Registered after the hook that saves."""

    def __init__(self, do: Callable[[], object]) -> None:
        self._do = do

    def after_end(self) -> None:
        if not has_failed(self.trainer):
            self._do()


class WriteSteps(PeriodicWriter):
    """Write when due, after each evaluation and the last update, and at the end of training."""

    _writes_evaluations = True

    def __init__(self, is_due: IsDue, build_writers: Callable[[], Sequence[EventWriter]]) -> None:
        super().__init__([])
        self._is_due = is_due
        self._build_writers = build_writers

    def before_train(self) -> None:
        self._dispatcher = WriterDispatcher(self._build_writers())  # with the current settings
        super().before_train()

    def after_step(self) -> None:
        trainer = self.trainer
        is_evaluated = trainer.last_eval_results is not self._written_results
        if self._is_due() or is_evaluated:
            self.write_now()
        elif trainer.iter + 1 == trainer.max_iter:
            self._write()

    def write_now(self) -> None:
        """Write the stored values immediately."""
        self.trainer.storage.written = self.trainer.iter
        self._write()

    def _write(self, *, is_last: bool = False) -> None:
        self.trainer.storage.samples = self.trainer.consumed_samples
        super()._write(is_last=is_last)


class TrainerFolder(RunFolder):
    """Run folder of ``Trainer``: ``training_config.yaml``, ``metrics.csv``, checkpoints and links to them."""

    setting = "TrainingConfig.output_dir"

    def __init__(self, path: str | Path, config: "TrainingConfig") -> None:
        events = config.tensorboard or {"log_dir": None, "comment": ""}
        event_folder = os.path.relpath(events["log_dir"] or Path(path, config.logs_dir, events["comment"]), path)
        self.layout = Layout(
            "training_config.yaml",
            _is_config,
            tables=("metrics.json", (Path(config.logs_dir) / CSV_NAME).as_posix()),
            event_folders=() if event_folder.startswith(os.pardir) else (Path(event_folder).as_posix(),),
            checkpoints=Path(config.checkpoints_dir).as_posix(),
            checkpoint_name=re.compile(r"\d+|model_best"),
            link_name=re.compile(r"epoch_\d+|final_epoch"),
            card="README.md" if config.save_enabled else None,
        )
        super().__init__(path, resume=False)

    def write_config(self, config: Any) -> None:
        """Create the folder and write ``training_config.yaml`` into it."""
        path = self.path / self.layout.config
        if not is_left_out(path):
            self.path.mkdir(parents=True, exist_ok=True)
            config.save_to_yaml(path)


def _is_config(head: bytes) -> bool:
    """Whether this is the beginning of a file that holds all settings."""
    return all(name in head for name in (b"overwrite_output_dir:", b"checkpoints_dir:", b"logs_dir:"))
