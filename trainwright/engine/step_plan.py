"""Which micro-batches form which update. No accumulation window crosses the end of an epoch."""

import math
from dataclasses import dataclass
from typing import Any

from trainwright.config.errors import ConfigError
from trainwright.data.sampler import EpochSampler, limited
from trainwright.parallel.dist import all_gather_object, get_data_parallel_size


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


def make_plan(
    loader: Any, *, num_epochs: int, max_steps: int | None, accumulation: int, limit: int | float | None = None
) -> StepPlan:
    """The plan of ``num_epochs`` passes over ``loader``, or of ``max_steps`` steps if these are fewer.

    ``limit``: the number of steps of each epoch, or the share of them.
    """
    steps_per_epoch, sampler = num_steps(loader, limit), getattr(loader, "batch_sampler", None)
    lengths = all_gather_object(steps_per_epoch)
    if len(set(lengths)) > 1:
        raise ConfigError(
            f"Trainer.train_dataloader: its lengths are {', '.join(map(str, lengths))} on the {len(lengths)} processes;"
            " they must be equal, because all processes make each step together."
        )
    total = num_epochs * steps_per_epoch
    batch_size = (getattr(sampler, "batch_size", None) or 0) * get_data_parallel_size()
    samples = getattr(sampler, "samples_per_epoch", None) or steps_per_epoch * batch_size
    return StepPlan(
        steps_per_epoch=steps_per_epoch,
        accumulation=accumulation,
        total_steps=total if max_steps is None else min(total, max_steps),
        batch_size=batch_size,
        samples_per_epoch=samples,
        has_epochs=not hasattr(loader, "is_open_ended"),
    )


def steps_of(period: int | float | None, total_steps: int) -> int:
    """A period in steps, which may be given as a fraction of all steps; 0: never."""
    return math.ceil(period * total_steps) if isinstance(period, float) else period or 0


def num_steps(loader: Any, limit: int | float | None) -> int:
    """The steps of an epoch: the batches of ``loader`` that ``limit``, a number or a share, leaves."""
    length = len(loader)
    if length == 0:
        raise ConfigError(f"Trainer.train_dataloader: {type(loader).__name__} is empty; it must yield a batch.")
    limits_itself = isinstance(getattr(loader, "batch_sampler", None), EpochSampler)
    return length if limits_itself else limited(length, limit)
