"""The hooks of a run of the Python API that depend on its settings."""

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from trainwright.checkpoint.checkpointer import Checkpointer
from trainwright.engine.state import TrainerState
from trainwright.engine.trainer.best_metric import BestMetric, raise_missing
from trainwright.engine.trainer.periods import Periods
from trainwright.events.storage import EventStorage
from trainwright.events.writers.progress import bar_stream
from trainwright.hooks import BestCheckpointer, HookBase, ReduceOnPlateau
from trainwright.hooks.callbacks import RunCallbacks
from trainwright.hooks.callbacks.progress import EpochProgress, epoch_lines
from trainwright.parallel.dist import is_main_process

if TYPE_CHECKING:
    from trainwright.config.settings import TrainingConfig

logger = logging.getLogger("trainwright.engine")


def best_checkpointer(
    config: "TrainingConfig",
    best: BestMetric,
    checkpointer: Checkpointer,
    periods: Periods,
    *,
    evaluates: bool,
    number: Callable[[], str],
    results: Callable[[], Mapping[str, Any]],
) -> BestCheckpointer | None:
    """The hook that saves the best checkpoint, of a run that evaluates and saves.

    ``number`` returns that of the checkpoints of ``save_top_k``, ``results`` the results of the latest evaluation.
    """
    if not (evaluates and config.save_enabled):
        if config.save_top_k is not None:
            logger.warning(
                "TrainingConfig.save_top_k=%d has no effect: nothing is %s.",
                config.save_top_k, "evaluated" if config.save_enabled else "saved",
            )  # fmt: skip
        return None
    best.check()
    metric = best.key
    return BestCheckpointer(
        periods.eval_is_due,
        checkpointer,
        metric,
        best.mode(),
        on_missing=(lambda: raise_missing(metric, results())) if config.load_best_model_at_end else None,
        top_k=config.save_top_k or 1,
        number=number,
    )


def plateau_hook(
    metric: str, state: TrainerState, callbacks: RunCallbacks, storage: Callable[[], EventStorage]
) -> ReduceOnPlateau:
    """Step by an evaluation result after each evaluation, or by a training metric at the end of each epoch."""

    def latest() -> float | None:
        value, _ = storage().latest().get(metric, (None, 0))
        return value

    if metric.startswith("evaluation/"):
        return ReduceOnPlateau(latest)
    return ReduceOnPlateau(callbacks.epoch_loss_of_all if metric == "total_loss" else latest, state.is_epoch_end)


def progress_lines(
    config: "TrainingConfig", state: TrainerState, periods: Periods, best: BestCheckpointer | None, *, evaluates: bool
) -> HookBase | None:
    """A line per epoch beside a bar and beside lines by steps; in place of a bar, a line every half minute."""
    plan = state.plan
    if not config.progress_bar or config.print_steps is not None or not is_main_process():
        return None
    if config.log_steps or bar_stream() is not None:
        period = plan.updates(periods.evaluate or plan.steps_per_epoch) if evaluates else None
        log_period = plan.updates(periods.log)
        return epoch_lines(plan.updates_per_epoch, plan.num_updates, log_period, eval_period=period, best=best)
    position = lambda: (state.epoch, state.epoch_step, plan.steps_per_epoch)  # noqa: E731
    return EpochProgress(config.num_epochs, position, steps_per_update=plan.accumulation)
