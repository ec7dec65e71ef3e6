"""Which micro-batches form which update. No accumulation window crosses the end of an epoch."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A step is one micro-batch; an update is a window of ``accumulation`` steps. The last window of an epoch, and of
    the run, may be shorter.
    """

    steps_per_epoch: int
    accumulation: int
    total_steps: int
    batch_size: int  # of all processes together; 0: unknown
    samples_per_epoch: int
    has_epochs: bool = True  # False: the data have no length, and the run is one epoch

    @property
    def num_updates(self) -> int:
        """Updates of the complete run."""
        return self.updates(self.total_steps)

    def updates(self, steps: int) -> int:
        """The number of updates after ``steps`` steps."""
        epochs, rest = divmod(steps, self.steps_per_epoch)
        return epochs * self.updates_per_epoch + -(-rest // self.accumulation)

    def steps(self, updates: int) -> int:
        """The number of steps after ``updates`` updates."""
        if self.accumulation == 1:
            return min(self.total_steps, updates)
        epochs, rest = divmod(updates, self.updates_per_epoch)
        return min(self.total_steps, epochs * self.steps_per_epoch + rest * self.accumulation)

    def samples(self, steps: int) -> int:
        """The number of samples of ``steps`` steps; 0 if unknown."""
        epochs, rest = divmod(steps, self.steps_per_epoch)
        return epochs * self.samples_per_epoch + min(rest * self.batch_size, self.samples_per_epoch)

    @property
    def updates_per_epoch(self) -> int:
        """Updates of a complete epoch."""
        return -(-self.steps_per_epoch // self.accumulation)


NO_STEPS = StepPlan(steps_per_epoch=1, accumulation=1, total_steps=0, batch_size=0, samples_per_epoch=0)


def steps_of(period: int | float | None, total_steps: int) -> int:
    """A period in steps, which may be given as a fraction of all steps; 0: never."""
    return math.ceil(period * total_steps) if isinstance(period, float) else period or 0
