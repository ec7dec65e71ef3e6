"""The peak of a training step on one of several processes, from the tensors that really exist."""

import gc
from collections.abc import Callable
from typing import Any

from trainwright.hooks import HookBase
from trainwright.inspect.simulation.step_cost import TensorBytes


class PeakOfSteps(HookBase):
    """The peak of each step."""

    def __init__(self, counted: TensorBytes) -> None:
        self._counted = counted
        self.peaks: list[int] = []

    def before_step(self) -> None:
        self._counted.start()

    def after_step(self) -> None:
        self.peaks.append(self._counted.peak)


def counted_peak(build: Callable[[], Any]) -> int:
    """The most bytes of the tensors of operations that exist at once in a step of the training of ``build()``.

    Each tensor is counted until it is freed, by whichever thread: gloo's threads hold a finished exchange for a moment
    longer than the thread that waits for it, and torch's profiler would never record that they free it. It is the
    lowest peak of several steps, as such a moment adds to some.
    """
    gc.collect()
    with TensorBytes() as counted, counted.watching_sizes():
        trainer, steps = build(), PeakOfSteps(counted)
        trainer.register_hooks([steps])
        trainer.train()
    return min(steps.peaks[2:])  # data parallelism and optimizers are in their steady state
