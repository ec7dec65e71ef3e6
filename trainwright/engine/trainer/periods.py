"""The length of a run of the Python API, and when it logs, evaluates and saves, in steps."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright.engine.state import TrainerState
from trainwright.engine.step_plan import StepPlan, make_plan, num_steps, steps_of
from trainwright.engine.trainer.loaders import with_length
from trainwright.engine.trainer.start import elastic_accumulation
from trainwright.parallel.dist import get_world_size

if TYPE_CHECKING:
    from trainwright.config.settings import TrainingConfig


logger = logging.getLogger("trainwright.engine")


def plan_run(config: "TrainingConfig", loader: Any, output_dir: Path) -> "tuple[TrainingConfig, Any, StepPlan]":
    """The configuration with the accumulation of an elastic run, the loader with a length, and the plan.

    Raises:
        ConfigError: they do not give the length of the training.
    """
    loader, plan = plan_of(config, loader)
    kept = elastic_accumulation(config, output_dir, plan.batch_size)
    if kept != config.gradient_accumulation_steps:
        config = config.copy_with(gradient_accumulation_steps=kept)
        loader, plan = plan_of(config, loader)
    return config, loader, plan


def plan_of(config: "TrainingConfig", loader: Any) -> tuple[Any, StepPlan]:
    """The loader with a length, and the plan."""
    max_steps = config.max_steps
    limit = config.overfit_batches or config.limit_train_batches
    loader = with_length(loader, limit, max_steps)
    if isinstance(max_steps, float):
        per_epoch = num_steps(loader, limit)
        share, max_steps = max_steps, steps_of(max_steps, per_epoch) * config.num_epochs
        logger.info(
            "TrainingConfig.max_steps=%g: %d steps in total, that fraction of %d epochs of %d batches. No epoch is"
            " shortened: training ends in epoch %d. limit_train_batches=%g shortens each epoch.",
            share, max_steps, config.num_epochs, per_epoch, -(-max_steps // per_epoch), share,
        )  # fmt: skip
    plan = make_plan(
        loader,
        num_epochs=config.num_epochs,
        max_steps=max_steps,
        accumulation=config.gradient_accumulation_steps,
        limit=limit,
    )
    if max_steps is not None and max_steps > plan.total_steps:
        logger.warning(
            "TrainingConfig.max_steps: %d exceeds the %d steps of num_epochs=%d, after which training ends.",
            max_steps, plan.total_steps, config.num_epochs,
        )  # fmt: skip
    return loader, plan


class Periods:
    """The periods of the configuration in steps, 0 for none, and whether they are over after the latest update.

    Attributes:
        save, log, evaluate, print: the periods.
        common_print: that of printed lines with the metrics of several processes; 0 with one process.
    """

    def __init__(self, config: "TrainingConfig", state: TrainerState) -> None:
        self._state = state
        self.plan(config)

    def plan(self, config: "TrainingConfig") -> None:
        """Compute the periods for the current length of the run."""
        self.save, self.log, self.evaluate, self.print = (
            steps_of(period, self._state.plan.total_steps)
            for period in (config.save_steps, config.log_steps, config.eval_steps, config.print_steps)
        )
        self.common_print = self.print if get_world_size() > 1 else 0
        saved = config.model_checkpoint or {}
        self._saved_steps: int = saved.get("every_n_iteration") or 0
        self._linked_epochs: int = saved.get("every_n_epoch") or 0

    def log_is_due(self) -> bool:
        return self._state.has_passed(self.log) if self.log else self._state.is_epoch_end()

    def eval_is_due(self) -> bool:
        return self._state.has_passed(self.evaluate) if self.evaluate else self._state.is_epoch_end()

    def metrics_are_due(self) -> bool:
        """Whether the metrics of the training are logged or printed."""
        return self.log_is_due() or bool(self.common_print and self._state.has_passed(self.common_print))

    def check_is_due(self) -> bool:
        """When values are checked, and computed over several processes: before anything reads them."""
        return self.metrics_are_due() or self._state.is_epoch_end()

    def save_is_due(self) -> bool:
        is_due = any(self._state.has_passed(period) for period in (self.save, self._saved_steps) if period)
        return is_due or self.is_linked_epoch_end()

    def is_linked_epoch_end(self) -> bool:
        """Whether an epoch has ended whose checkpoint has a link ``epoch_{n}``."""
        state, period = self._state, self._linked_epochs
        return bool(period) and state.is_epoch_end() and state.epoch % period == 0

    def saves_before_end(self, *, keeps_best: bool) -> bool:
        """Whether a checkpoint is due before the last step, including the best one after an evaluation."""
        plan, done = self._state.plan, self._state.global_step
        periods = [self.save, self._saved_steps, self._linked_epochs * plan.steps_per_epoch]
        if keeps_best:
            periods.append(self.evaluate or plan.steps_per_epoch)
        return any(period and -(-done // period) * period < plan.total_steps for period in periods)
