"""Exchanges of all ranks at steps that each of them knows in advance, about once in a period of time."""

import time

from trainwright.base import dist

_MAX_STEPS_APART = 1000


class AgreedChecks:
    """Checks that all ranks make before the same steps, such as iterations or batches.

    An exchange in each step would cost 0.1 ms with gloo, and with NCCL the time that the GPU is behind.

    Args:
        first: the step of the first check.
        period_s: the time between two checks.

    Attributes:
        next: the step of the next check, equal on all ranks.
    """

    def __init__(self, first: int, period_s: float = 1.0) -> None:
        self.next, self._period_s = first, period_s
        self._last = (first - 1, time.perf_counter())  # step, time in seconds

    def largest(self, step: int, *numbers: int) -> list[int]:
        """The largest value of each number over all ranks, and the step of the next check. Every rank calls this."""
        before, then = self._last
        now = time.perf_counter()
        apart = round(self._period_s * (step - before) / max(now - then, 1e-6))
        apart = min(max(1, apart), 2 * max(1, step - before), _MAX_STEPS_APART)
        apart, *found = dist.largest(apart if dist.is_main_process() else 0, *numbers)
        self._last, self.next = (step, now), step + apart
        return found
