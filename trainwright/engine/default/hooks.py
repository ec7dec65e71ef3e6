"""The hooks of a run that a configuration describes: timing, schedule, checkpoints, evaluation, writers."""

import logging
from functools import partial
from typing import Any

from trainwright.engine.default.setup import check_eval_metric
from trainwright.engine.folder.summary import facts_of_files
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
from trainwright.parallel.dist import is_main_process

logger = logging.getLogger("trainwright.engine")


def build_hooks(trainer: Any) -> list[HookBase | None]:
    """The hooks of a ``DefaultTrainer``, in the order of their calls."""
    train, evaluation, checkpoints = trainer.cfg.train, trainer.cfg.train.evaluation, trainer.cfg.train.checkpointer
    eval_period: int | None = None
    best: BestCheckpointer | None = None
    save_period = _period(trainer, checkpoints.period, checkpoints.get("save_model_after_n_epoch"))
    hooks: list[HookBase | None] = [
        IterationTimer(facts=facts_of_files),
        LRScheduler(),
        PeriodicCheckpointer(trainer.checkpointer, save_period, max_to_keep=checkpoints.max_to_keep),
    ]
    if evaluation.enabled and trainer.test_loader:
        evaluator, eval_period = trainer.build_evaluator(trainer.cfg), evaluation.eval_period
        check_eval_metric(trainer, evaluator)
        period = _period(trainer, evaluation.eval_period, evaluation.get("eval_after_n_epoch"))
        best = BestCheckpointer(
            period, trainer.checkpointer, evaluation.eval_metric, evaluation.eval_mode,
            top_k=checkpoints.save_top_k or 1,
        )  # fmt: skip
        hooks += [EvalHook(period, partial(trainer._evaluate, evaluator)), best]
    elif checkpoints.save_top_k is not None:
        logger.warning("train.checkpointer.save_top_k has no effect: nothing is evaluated.")
    hooks.append(profile_hook(train.profile, train.output_dir))
    if train.progress_bar:
        per_epoch = trainer._iterations_per_epoch()
        hooks.append(epoch_lines(per_epoch, trainer.max_iter, train.log_period, eval_period=eval_period, best=best))
    if is_main_process():
        hooks.append(PeriodicWriter(lambda: trainer.build_writers(), train.log_period))
    return hooks


def _period(trainer: Any, iterations: int, epochs: int | None) -> Period:
    """``iterations``, or the ends of each ``epochs`` epochs, which may lie within an iteration."""
    per_epoch = trainer._iterations_per_epoch()
    if epochs is None or per_epoch is None:
        return iterations
    whole, parts = (per_epoch * epochs).as_integer_ratio()
    return lambda: (trainer.iter + 1) * parts // whole > trainer.iter * parts // whole
