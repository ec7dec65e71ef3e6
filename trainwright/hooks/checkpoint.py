"""Save checkpoints during training.

A checkpoint is due *after* an iteration and saved *between* iterations, when every hook has finished that one: before
the next one begins, or in ``after_train``. So it includes the state of hooks (for example the best metric), whatever
their order. It is written asynchronously; ``after_train`` waits for the last ones.
"""

import logging
import math
import operator
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from trainwright.base.dist import broadcast_object, get_world_size
from trainwright.base.errors import ConfigError
from trainwright.base.files import relative_path
from trainwright.checkpoint.checkpointer import Checkpointer
from trainwright.checkpoint.errors import CheckpointError
from trainwright.checkpoint.folder import check_name, keep_named, keep_newest, numbered_name
from trainwright.evaluation.evaluator import flatten_results_dict
from trainwright.events.epoch_means import RunningMean
from trainwright.events.phases import PhaseTimes
from trainwright.events.storage import mean_so_far
from trainwright.events.writers.progress import unit_of
from trainwright.hooks.base import BestResult, HookBase, has_failed
from trainwright.hooks.due import Condition, Moment, Period

logger = logging.getLogger("trainwright.hooks")


def has_failed_at_start(trainer: Any) -> bool:
    """Whether the training failed before its first iteration, perhaps before the state of a resumed run was restored.

    The checkpoint that it resumed from is current, and must not be overwritten.
    """
    return bool(trainer.has_failed and trainer.iterations_done == trainer.start_iter)


def is_finished(trainer: Any) -> bool:
    """Whether every iteration is done, on all ranks; an ``after_train`` may have failed since."""
    return bool(trainer.iter >= trainer.max_iter and not has_failed_at_start(trainer))


def check_prefix(prefix: str, where: str) -> None:
    """Check before the training that a checkpoint can have this name."""
    try:
        check_name(prefix)
    except CheckpointError as error:
        raise ConfigError(f"{where}: {error}") from error


class PeriodicCheckpointer(HookBase):
    """Save ``{file_prefix}_{iter:07d}`` when ``period`` is over and ``{file_prefix}_final`` after the last iteration.

    ``iter`` in the name is the 0-based last completed iteration. ``max_to_keep`` limits the number of numbered
    checkpoints; the newest are kept, and those that ``model_best`` or ``last_checkpoint`` point at. ``max_iter`` is
    the trainer's by default.

    After a failure in a later hook, for example in an evaluation, a due checkpoint of the completed iteration is saved
    too, unless there are several processes.

    Args:
        save: saves the current training state under the caller's own name, which is also the last one's. It takes
            ``keep_trained``, as :meth:`Checkpointer.save` does.
    """

    slot = "save"
    in_copies = False

    def __init__(
        self,
        checkpointer: Checkpointer,
        period: Period,
        max_iter: int | None = None,
        max_to_keep: int | None = None,
        file_prefix: str = "model",
        *,
        save: Callable[..., None] | None = None,
    ) -> None:
        if max_to_keep is not None and max_to_keep < 1:
            raise ConfigError(f"PeriodicCheckpointer.max_to_keep: got {max_to_keep}; it must be None or at least 1.")
        self._checkpointer = checkpointer
        self._is_due = Condition(period)
        self.due = (Moment.FIRST, self._is_due)
        self._max_iter = max_iter
        self._max_to_keep = max_to_keep
        check_prefix(file_prefix, "PeriodicCheckpointer.file_prefix")
        self._prefix = file_prefix
        self._save_by = save
        self._due: int | None = None  # the iteration to save
        self._is_prepared = False

    def before_train(self) -> None:
        self._checkpointer.check_folder()
        self._checkpointer.rehearse()

    def after_step(self) -> None:
        if self._is_due(self.trainer):
            self._due = self.trainer.iter
            self.trainer.call_between_steps(self._save_due)
        if not self._is_prepared:  # an optimizer has its state after its first step
            self._is_prepared = True
            with self.trainer.phases.counting("save"):
                self._checkpointer.prepare()

    def _save_due(self) -> None:
        self._due = None
        self._save()

    def after_train(self) -> None:
        due, self._due = self._due, None
        is_complete, is_last = is_finished(self.trainer), self._is_last()
        # The update is complete, also if a later hook has failed after it.
        is_due = due is not None and self.trainer.iterations_done == due + 1
        try:
            # After a failure the other processes may not reach this point.
            if is_due and (is_complete or get_world_size() == 1) and not (is_last and self._save_by):
                self._save()
            # Before the final evaluation, which may take long: a kill during it loses no training.
            if is_last:
                self._save(is_final=True)
        finally:
            _wait(self.trainer.phases, self._checkpointer, alone=not is_complete)

    def after_end(self) -> None:
        """Save the final checkpoint again, with the state of hooks that the final evaluation has changed."""
        if self._is_last() and not self.trainer.has_failed:
            self._save(is_final=True, keep_trained=True)
            _wait(self.trainer.phases, self._checkpointer)

    def _is_last(self) -> bool:
        is_last = self.trainer.iter >= (self.trainer.max_iter if self._max_iter is None else self._max_iter)
        return bool(is_last and not has_failed_at_start(self.trainer))

    def _save(self, *, is_final: bool = False, **settings: Any) -> None:
        trainer = self.trainer
        with trainer.storage.rate.interrupted("save", trainer.phases, trainer.iterations_done):
            if self._save_by is not None:
                self._save_by(**settings)
                return
            delete_older = None  # after the final one too: a kill may have prevented earlier deletions
            if self._max_to_keep is not None and self._checkpointer.save_to_disk:
                delete_older = partial(_delete, keep_newest, self._prefix, self._max_to_keep)
            iteration = self.trainer.iterations_done - 1
            name = f"{self._prefix}_final" if is_final else numbered_name(iteration, self._prefix)
            self._checkpointer.save(name, prune=delete_older, iteration=iteration, **settings)


def _wait(phases: PhaseTimes, checkpointer: Checkpointer, *, alone: bool = False) -> None:
    with phases.counting("save"):
        checkpointer.wait(alone=alone)


def _delete(keep: Callable[..., object], prefix: str, which: Any, save_dir: Path) -> None:
    try:
        keep(save_dir, prefix, which)
    except OSError as error:  # the next save tries again; an extra checkpoint does no harm
        logger.warning("%s: an older checkpoint could not be deleted (%s).", save_dir, error)


def names_of_metric(metric: str, *, is_of_training: bool) -> tuple[str, ...]:
    """The names that a metric may have in the storage: ``eval_…`` where the training has values of the other one."""
    return (metric,) if is_of_training else (f"eval_{metric}", metric)


class BestCheckpointer(HookBase):
    """Save ``file_prefix`` whenever ``val_metric`` is the best so far.

    Higher is better for mode "max", lower for "min".

    Checks the metric when ``eval_period`` is over, and at the end. NaN and infinity are never
    best. The best value so far survives a resume. If an evaluation did not compute the metric, it warns once, with what
    ``on_missing()`` returns at the end; None: no warning.

    ``top_k``: also keep the k best checkpoints, as ``{file_prefix}_{number()}``; ``file_prefix`` is a link to the best
    of them. The number is that of the iteration by default.

    Of a noisy metric of the training, such as ``total_loss``, the mean since the last check counts: that of the epoch
    where each epoch is evaluated once. ``only_when_due``: the end of the training is no check by itself.
    ``is_of_training``: it is a metric of the training, also where evaluations have a result of this name.
    """

    slot = "evaluate"
    in_copies = False

    def __init__(
        self,
        eval_period: Period,
        checkpointer: Checkpointer,
        val_metric: str,
        mode: str = "max",
        file_prefix: str = "model_best",
        *,
        top_k: int = 1,
        number: Callable[[], str] | None = None,
        on_missing: Callable[[], str | None] | None = None,
        only_when_due: bool = False,
        is_of_training: bool = False,
    ) -> None:
        if mode not in ("max", "min"):
            raise ConfigError(f"BestCheckpointer.mode: got {mode!r}; it must be 'max' or 'min'.")
        self._is_check_due = Condition(eval_period)
        self.due = (self._is_check_due,)
        self._checkpointer = checkpointer
        self.metric = val_metric
        self._direction = "higher" if mode == "max" else "lower"
        self._is_better = operator.gt if mode == "max" else operator.lt
        if top_k < 1:
            raise ConfigError(f"BestCheckpointer.top_k: got {top_k}; it must be a whole number >= 1.")
        check_prefix(file_prefix, "BestCheckpointer.file_prefix")
        self._file_prefix = file_prefix
        self.names = names_of_metric(val_metric, is_of_training=is_of_training)
        self.best: float | None = None
        self.best_iter: int | None = None
        self.best_results: dict[str, float] = {}  # of the evaluation that has found it
        self.top: list[tuple[float, int, str]] = []  # value, iteration and name, the best first
        self._top_k = 0 if top_k == 1 else top_k  # the best one has its own name
        self._number = number or (lambda: f"{self._last_iteration():07d}")
        self._due: int | None = None
        self._on_missing = on_missing
        self._since_check = RunningMean(is_finite=True)  # begins after each check
        self._only_when_due, self._is_end_due = only_when_due, False
        self._has_warned = False
        self._is_late = False  # the metric comes from a hook that is called after this one, or is not computed

    def state_dict(self) -> dict[str, Any]:
        # A checkpoint that is saved first has the new best value, and may be the last one that a killed run writes.
        top = {"top": [list(entry) for entry in self.top]} if self._top_k else {}
        best = {"best": self.best, "best_iter": self.best_iter, "results": self.best_results}
        hints = self.trainer.storage.smoothing_hints()
        metric = next((name for name in self.names if name in hints), "")
        since = {}
        if hints.get(metric):
            mean_so_far(self.trainer.storage, metric, self._since_check)
            since = {"since": self._since_check.state_dict()}
        return {"metric": self.metric, **best, "due": self._due, **top, **since}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state.get("metric", self.metric) != self.metric:  # the two cannot be compared
            logger.warning(
                "The best checkpoint was chosen by %s, now by %s: it restarts.", state["metric"], self.metric
            )
            return
        self.best, self.best_iter, self._due = state["best"], state["best_iter"], state.get("due")
        self.best_results = state.get("results", {})
        self._since_check.begin(0)
        if "next" in state.get("since", ()):
            self._since_check.load_state_dict(state["since"])
        self.top = [(value, at, name) for value, at, name in state.get("top", [])][: self._top_k]

    def before_first_step(self) -> None:
        self._is_end_due = False
        if self._due is not None:  # of the run that is continued
            self.trainer.call_between_steps(self._finish)

    def after_step(self) -> None:
        if self._is_check_due(self.trainer):
            self._is_end_due = self.trainer.iter + 1 == self.trainer.max_iter
            if not self._is_end_due:
                self.use_results()

    def use_results(self) -> None:
        self._is_late = not self._check_metric()
        self.trainer.call_between_steps(self._finish)

    def _finish(self) -> None:
        """After every hook of the iteration."""
        self._check_again()
        self._save_due()

    def after_train(self) -> None:
        try:
            # A part of a period would be compared with whole ones, unless there is nothing else.
            is_part = self._only_when_due and not self._is_end_due and self.best is not None
            if not (has_failed(self.trainer) or is_part):
                self._is_late = not self._check_metric()
                self._save_due()
        finally:
            _wait(self.trainer.phases, self._checkpointer, alone=not is_finished(self.trainer))

    def after_end(self) -> None:
        if self._is_late and not has_failed(self.trainer):
            self._check_again()
            self._save_due()
            _wait(self.trainer.phases, self._checkpointer)

    def _check_metric(self) -> bool:
        """Record a new best value. Returns whether there is a value of this iteration."""
        last, storage = self._last_iteration(), self.trainer.storage
        metric = next(name for name in self.names if name in storage.smoothing_hints() or name == self.metric)
        if storage.first_local_iteration(metric) <= last:
            storage.reduce()
        value, put_at = storage.latest().get(metric, (math.nan, -1))
        if put_at >= last and storage.smoothing_hints()[metric] and math.isfinite(value):  # not that of a single batch
            value = mean_so_far(storage, metric, self._since_check)
        # All processes decide by the same value, also one that each has put for itself: they save together.
        value, put_at = broadcast_object((value, put_at))
        if put_at < last:
            return False
        self._since_check.begin(put_at + 1)
        if math.isfinite(value):
            if self.best is None or self._is_better(value, self.best):
                self.best, self.best_iter, self._due = value, last, last
                results = flatten_results_dict(self.trainer.last_eval_results)
                self.best_results = {name: float(result) for name, result in results.items()}
            if len(self.top) < self._top_k or (self.top and self._is_better(value, self.top[-1][0])):
                place = next((n for n, entry in enumerate(self.top) if self._is_better(value, entry[0])), len(self.top))
                self.top.insert(place, (value, last, f"{self._file_prefix}_{self._number()}"))
                self.top, self._due = self.top[: self._top_k], last
        return True

    def _check_again(self) -> None:
        is_late, self._is_late = self._is_late, False
        if not is_late or self._check_metric():
            return
        hint = "" if self._on_missing is None else self._on_missing()
        if hint is not None and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "The evaluation did not compute %r, which selects the best checkpoint; it computed: %s. No %s is"
                " saved.%s",
                self.metric, ", ".join(sorted(flatten_results_dict(self.trainer.last_eval_results))) or "nothing",
                self._file_prefix, hint and f" {hint}",
            )  # fmt: skip

    def _last_iteration(self) -> int:
        # The final evaluation counts as iteration max_iter, one more than the last completed iteration. A training
        # metric belongs to that one.
        return int(self.trainer.iterations_done - 1)

    def _save_due(self) -> None:
        iteration, self._due = self._due, None
        if iteration is None:
            return
        settings: dict[str, Any] = {"tag_last": False, "iteration": iteration}
        trainer = self.trainer
        with trainer.storage.rate.interrupted("save", trainer.phases, trainer.iterations_done):
            names = [name for _, _, name in self.top]
            delete = partial(_delete, keep_named, self._file_prefix, names)
            for value, at, name in self.top:
                if at == iteration:
                    self._checkpointer.save(name, prune=delete, **settings | {self.metric: value})
            if self.best_iter == iteration:
                self._checkpointer.save(self._file_prefix, **settings | {self.metric: self.best})
        if self.best_iter == iteration:
            is_marked = self.trainer.storage.line_at == iteration + 1  # in the line of the epoch
            text = "Best %s so far (%s is better), saved as %s."
            logger.info(text, self.metric, self._direction, self._file_prefix, extra={"file_only": is_marked})

    def best_result(self) -> BestResult | None:
        if self.best is None or self.best_iter is None:
            return None
        path = os.path.join(self._checkpointer.save_dir, self._file_prefix)
        here, at = relative_path(path), self.best_iter + 1
        here = path if here.startswith(os.pardir) else here
        text = f"{self.metric} {self.best:.5g}{unit_of(self.metric)} (iteration {at}): {here}"
        return BestResult(self.metric, self.best, at, self._direction == "higher", path, text)
