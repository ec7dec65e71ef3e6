"""The plan of a run of the Python API: which micro-batches form an update, and where epochs and the run end."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from trainwright.config.windows import Windows


class Start(NamedTuple):
    """Where an epoch starts: its number, from 0, and the steps, updates and samples before it."""

    epoch: int = 0
    step: int = 0
    update: int = 0
    samples: int = 0


_FIRST = Start()
_SINGLE = Windows.of(1)


@dataclass(frozen=True, slots=True)
class _Part:
    """Updates of ``length`` steps from ``update`` on, in epochs of equal lengths."""

    update: int
    step: int  # the steps before it
    length: int
    in_epoch: int  # those of its first epoch
    steps_per_epoch: int

    @property
    def _first(self) -> tuple[int, int]:
        """The updates and the steps until its first epoch ends."""
        steps = self.steps_per_epoch - self.in_epoch
        return -(-steps // self.length), steps

    def steps(self, updates: int) -> int:
        (first, steps), more = self._first, updates - self.update
        if more < first:
            return self.step + more * self.length
        epochs, rest = divmod(more - first, -(-self.steps_per_epoch // self.length))
        return self.step + steps + epochs * self.steps_per_epoch + rest * self.length

    def updates(self, steps: int) -> int:
        (first, to_end), more = self._first, steps - self.step
        if more < to_end:
            return self.update - (-more // self.length)
        epochs, rest = divmod(more - to_end, self.steps_per_epoch)
        return self.update + first + epochs * -(-self.steps_per_epoch // self.length) - (-rest // self.length)


@functools.lru_cache
def _parts(windows: Windows, update: int, step: int, steps_per_epoch: int) -> Sequence[_Part]:
    """The parts of a plan whose first epoch starts after so many updates and steps, the latest first."""
    parts = [_Part(update, step, windows.at(update), 0, steps_per_epoch)]
    for first, length in windows.lengths:
        if first > update:
            before = parts[0].steps(first)
            parts.insert(0, _Part(first, before, length, (before - step) % steps_per_epoch, steps_per_epoch))
    return parts


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A step is one micro-batch; an update is a window of steps, as many as ``windows`` has for its number. The last
    window of an epoch, and of the run, may be shorter.

    All epochs from ``start`` on are planned with the length of the latest. The ones before are those of ``before``.
    """

    steps_per_epoch: int
    windows: Windows
    batch_size: int  # of all processes together; 0: unknown
    samples_per_epoch: int
    num_epochs: int
    max_steps: int | None = None
    has_epochs: bool = True  # False: the data have no length, and the run is one epoch
    start: Start = _FIRST
    before: "StepPlan | None" = field(default=None, repr=False, compare=False)

    @property
    def total_steps(self) -> int:
        """Steps of the complete run, if its further epochs have the length of the current one."""
        total = self.start.step + (self.num_epochs - self.start.epoch) * self.steps_per_epoch
        return total if self.max_steps is None else min(total, self.max_steps)

    @property
    def num_updates(self) -> int:
        """Updates of the complete run."""
        return self.updates(self.total_steps)

    def updates(self, steps: int) -> int:
        """The number of updates after ``steps`` steps."""
        part = next(one for one in self._planned_at(steps)._parts() if one.step <= steps)
        return part.updates(steps)

    def steps(self, updates: int) -> int:
        """The number of steps after ``updates`` updates."""
        if self.windows.lengths == _SINGLE.lengths:
            return min(self.total_steps, updates)
        plan = self
        while plan.before is not None and updates < plan.start.update:
            plan = plan.before
        part = next(one for one in plan._parts() if one.update <= updates)
        return min(self.total_steps, part.steps(updates))

    def _parts(self) -> Sequence[_Part]:
        return _parts(self.windows, self.start.update, self.start.step, self.steps_per_epoch)

    def samples(self, steps: int) -> int:
        """The number of samples of the first ``steps`` steps; 0 if unknown."""
        plan = self._planned_at(steps)
        epochs, rest = divmod(steps - plan.start.step, plan.steps_per_epoch)
        samples = min(rest * plan.batch_size, plan.samples_per_epoch)
        return plan.start.samples + epochs * plan.samples_per_epoch + samples

    def epoch_at(self, steps: int) -> tuple[int, int]:
        """The epoch, from 0, of the step that follows ``steps`` steps, and the number of steps before the epoch."""
        plan = self._planned_at(steps)
        epochs, rest = divmod(steps - plan.start.step, plan.steps_per_epoch)
        return plan.start.epoch + epochs, steps - rest

    def samples_of_epoch(self, steps: int) -> int:
        """The samples of the epoch of the step that follows ``steps`` steps."""
        return self._planned_at(steps).samples_per_epoch

    def epoch_of(self, update: int) -> tuple[int, int]:
        """The first update, from 0, of the epoch of an update, and that of the next epoch."""
        epoch, first = self.epoch_at(self.steps(update))
        return self.updates(first), self.updates(self.end_of_epoch(epoch + 1))

    def _planned_at(self, steps: int) -> "StepPlan":
        plan = self
        while plan.before is not None and steps < plan.start.step:
            plan = plan.before
        return plan

    def end_of_epoch(self, number: int) -> int:
        """The number of steps after epoch ``number``, counted from 1."""
        plan = self
        while plan.before is not None and number <= plan.start.epoch:
            plan = plan.before
        return plan.start.step + (number - plan.start.epoch) * plan.steps_per_epoch

    def next_passing(self, period: int, updates: int) -> int:
        """The least number of updates, above ``updates``, that may reach or cross a multiple of ``period`` steps."""
        return self._next_at((self.steps(updates) // period + 1) * period, updates)

    def next_epoch_end(self, every: int, updates: int) -> int:
        """The least number of updates, above ``updates``, at which an epoch of each ``every`` may end."""
        epoch, _ = self.epoch_at(self.steps(updates))
        return self._next_at(self.end_of_epoch((epoch // every + 1) * every), updates)

    def _next_at(self, steps: int, updates: int) -> int:
        # Any update beyond the plan: a callback may have made the run longer.
        return max(updates + 1, min(self.updates(steps), self.num_updates + 1))

    def with_epoch(self, steps: int, steps_per_epoch: int, samples_per_epoch: int) -> "StepPlan":
        """The plan whose epochs from ``steps`` steps on have another length."""
        epoch, _ = self.epoch_at(steps)
        start = Start(epoch, steps, self.updates(steps), self.samples(steps))
        # No epoch has had the length of a plan that starts here.
        before = self.before if self.start == start else self
        return replace(
            self, steps_per_epoch=steps_per_epoch, samples_per_epoch=samples_per_epoch, start=start, before=before
        )

    def lengths(self) -> list[list[int]]:
        """The first epoch of each length, its steps and its samples."""
        found = list[list[int]]()
        plan: StepPlan | None = self
        while plan is not None:
            found.append([plan.start.epoch, plan.steps_per_epoch, plan.samples_per_epoch])
            plan = plan.before
        return found[::-1]

    def with_lengths(self, lengths: Sequence[Sequence[int]]) -> "StepPlan":
        """The plan with the lengths of epochs that ``lengths`` returned."""
        (_, steps, samples), *rest = lengths
        plan = replace(self, steps_per_epoch=steps, samples_per_epoch=samples, start=_FIRST, before=None)
        for epoch, steps, samples in rest:
            plan = plan.with_epoch(plan.end_of_epoch(epoch), steps, samples)
        return plan


NO_STEPS = StepPlan(steps_per_epoch=1, windows=_SINGLE, batch_size=0, samples_per_epoch=0, num_epochs=0)


def steps_of(period: int | float | None, total_steps: int) -> int:
    """A period in steps, which may be given as a fraction of all steps; 0: never."""
    return math.ceil(period * total_steps) if isinstance(period, float) else period or 0
