"""The hooks of a run that a configuration describes: timing, schedule, checkpoints, evaluation, writers."""

import logging
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from omegaconf import DictConfig

from trainwright.checkpoint.checkpointer import Checkpointer
from trainwright.engine.run_hooks import ordered_hooks, timing_facts
from trainwright.events.writers import EventWriter
from trainwright.hooks import (
    BestCheckpointer,
    EvalHook,
    HookBase,
    IterationTimer,
    LRScheduler,
    PeriodicCheckpointer,
    PeriodicWriter,
)
from trainwright.hooks.base import Period
from trainwright.hooks.callbacks.progress import epoch_lines
from trainwright.hooks.profile import profile_hook
from trainwright.hooks.timer import SettingNames
from trainwright.parallel.dist import is_main_process

logger = logging.getLogger("trainwright.engine")


def build_hooks(
    train: DictConfig,
    checkpointer: Checkpointer,
    evaluate: Callable[[], dict[str, Any]] | None,
    *,
    build_writers: Callable[[], list[EventWriter]],
    num_iterations: int,
    per_epoch: int | Fraction | None,
    iteration: Callable[[], int],
) -> list[HookBase | None]:
    """The hooks of a ``DefaultTrainer``, in the order of their calls.

    Args:
        evaluate: None: nothing is evaluated.
        per_epoch: the iterations of an epoch; None: unknown.
        iteration: returns the current one.
    """

    def period(iterations: int, epochs: int | None) -> Period:
        """``iterations``, or the ends of each ``epochs`` epochs, which may lie within an iteration."""
        if epochs is None or per_epoch is None:
            return iterations
        whole, parts = (per_epoch * epochs).as_integer_ratio()
        return lambda: (iteration() + 1) * parts // whole > iteration() * parts // whole

    evaluation, saving = train.evaluation, train.checkpointer
    save_period = period(saving.period, saving.get("save_model_after_n_epoch"))
    eval_hook: EvalHook | None = None
    best: BestCheckpointer | None = None
    if evaluate is not None:
        eval_period = period(evaluation.eval_period, evaluation.get("eval_after_n_epoch"))
        eval_hook = EvalHook(eval_period, evaluate)
        best = BestCheckpointer(
            eval_period, checkpointer, evaluation.eval_metric, evaluation.eval_mode, top_k=saving.save_top_k or 1
        )
    elif saving.save_top_k is not None:
        logger.warning("train.checkpointer.save_top_k has no effect: nothing is evaluated.")
    lines: HookBase | None = None
    if train.progress_bar:
        shown = None if evaluate is None else evaluation.eval_period
        lines = epoch_lines(per_epoch, num_iterations, train.log_period, eval_period=shown, best=best)
    return ordered_hooks(
        timer=IterationTimer(facts=lambda trainer: timing_facts(trainer.run, names_of_settings(train))),
        schedules=[LRScheduler()],
        save=PeriodicCheckpointer(checkpointer, save_period, max_to_keep=saving.max_to_keep),
        evaluate=eval_hook,
        best=best,
        profile=profile_hook(train.profile, train.output_dir),
        lines=lines,
        write=PeriodicWriter(build_writers, train.log_period) if is_main_process() else None,
    )


def names_of_settings(train: DictConfig) -> SettingNames:
    """The settings that the advice at the end of a training names."""
    by_epochs, by_period = "train.checkpointer.save_model_after_n_epoch", "train.checkpointer.period"
    save = by_epochs if train.checkpointer.get("save_model_after_n_epoch") else by_period
    by_epochs, by_period = "train.evaluation.eval_after_n_epoch", "train.evaluation.eval_period"
    evaluate = by_epochs if train.evaluation.get("eval_after_n_epoch") else by_period
    return SettingNames(
        workers="num_workers of dataloader.train",
        no_workers="num_workers=0 of dataloader.train",
        asynchronous="train.checkpointer.asynchronous=True",
        profile="train.profile=True",
        save=f"a larger {save}",
        evaluate=f"a larger {evaluate}",
    )
