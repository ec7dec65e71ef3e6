"""When a run of the Python API logs, evaluates and saves, in steps."""

from typing import TYPE_CHECKING

from trainwright.engine.state import TrainerState
from trainwright.engine.step_plan import StepPlan, steps_of
from trainwright.parallel.dist import get_world_size

if TYPE_CHECKING:
    from trainwright.config.settings import TrainingConfig


class Periods:
    """The periods of the configuration in steps, 0 for none, and whether they are over after the latest update.

    Attributes:
        save, log, evaluate, print: the periods.
        common_print: that of printed lines with the metrics of several processes; 0 with one process.
    """

    def __init__(self, config: "TrainingConfig", plan: StepPlan, state: TrainerState) -> None:
        self._state = state
        self.plan(config, plan)

    def plan(self, config: "TrainingConfig", plan: StepPlan) -> None:
        """Use the periods of a run of this length."""
        self._steps_per_epoch, self._total_steps = plan.steps_per_epoch, plan.total_steps
        self.save, self.log, self.evaluate, self.print = (
            steps_of(period, plan.total_steps)
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
        periods = [self.save, self._saved_steps, self._linked_epochs * self._steps_per_epoch]
        if keeps_best:
            periods.append(self.evaluate or self._steps_per_epoch)
        done = self._state.global_step
        return any(period and -(-done // period) * period < self._total_steps for period in periods)
