"""Where a run of the objects door is, and what its checkpoints hold of it."""

from collections.abc import Mapping
from typing import Any

from trainwright.config.errors import ConfigError
from trainwright.engine.loop import TrainerBase
from trainwright.engine.progress import TrainingProgress
from trainwright.engine.step_plan import StepPlan
from trainwright.hooks.callbacks.epoch_mean import EpochMean


class TrainerState(TrainingProgress):
    """The run's position in steps: ``global_step`` of the whole run, ``epoch`` (from 1 on), ``epoch_step`` within it.

    While a step runs it is counted already. A checkpoint also holds what the base class does.
    """

    def __init__(
        self, trainer: TrainerBase, plan: StepPlan, parts: Mapping[str, object], **settings: float | None
    ) -> None:
        super().__init__(trainer, parts, **settings)
        self._plan = plan
        self._mean_loss = EpochMean("total_loss")
        self.global_step = 0
        self.step_before = 0  # what global_step was before the newest update

    def set_parts(self, parts: Mapping[str, object]) -> None:
        """The other things in the checkpoints, by name."""
        self._classes = {name: type(part).__name__ for name, part in parts.items()}

    def mean_loss(self) -> float:
        """The mean of the updates' losses since the run began; NaN before the first."""
        return self._mean_loss.read(self._trainer.storage)

    @property
    def epoch(self) -> int:
        """The epoch of the newest step; 1 before the first."""
        return max(0, self.global_step - 1) // self._plan.steps_per_epoch + 1

    @property
    def epoch_step(self) -> int:
        """Steps of this epoch."""
        return self.global_step - (self.epoch - 1) * self._plan.steps_per_epoch

    @property
    def updates_done(self) -> int:
        """How many updates of the weights these steps are."""
        return self._plan.updates(self.global_step)

    def has_passed(self, period: int) -> bool:
        """Whether the newest update has come to, or over, a multiple of ``period`` steps."""
        return self.global_step // period > self.step_before // period

    def is_epoch_end(self) -> bool:
        """Whether the newest step is the last of its epoch."""
        return self.global_step % self._plan.steps_per_epoch == 0

    def __repr__(self) -> str:
        return f"TrainerState(global_step={self.global_step}, epoch={self.epoch}, epoch_step={self.epoch_step})"

    def state_dict(self) -> dict[str, Any]:
        return {
            **super().state_dict(),
            "consumed_samples": self._plan.samples(self.global_step),
            "iterations_done": self.updates_done,
            "global_step": self.global_step,
            "epoch": self.epoch,
            "epoch_step": self.epoch_step,
            "steps_per_epoch": self._plan.steps_per_epoch,
            "gradient_accumulation_steps": self._plan.accumulation,
            "mean_loss": self._mean_loss.state_dict(self._trainer.storage),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        plan, step = self._plan, state["global_step"]
        here = {"steps_per_epoch": plan.steps_per_epoch, "gradient_accumulation_steps": plan.accumulation}
        faults = [
            f"{name} was {state[name]} and is {value} now" for name, value in here.items() if state[name] != value
        ]
        if not faults and step < plan.total_steps and plan.steps(plan.updates(step)) != step:
            faults.append(f"max_steps had ended it inside an accumulation window, at step {step}")
        samples = state["consumed_samples"], plan.samples(step)
        if not faults and samples[0] != samples[1]:
            faults.append(f"its {step} steps took {samples[0]} samples, and would have taken {samples[1]} now")
        if faults:
            raise ConfigError(
                f"The run cannot be resumed: {'; '.join(faults)}. Give the same data,"
                " gradient_accumulation_steps and batch_size (with another number of processes, one that"
                " makes as large a batch of all together), or begin anew with TrainingConfig.init_weights_from."
            )
        super().load_state_dict(state)
        self._mean_loss.load_state_dict(state["mean_loss"])
        self.global_step = step
