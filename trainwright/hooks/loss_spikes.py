"""Find losses far above those before them: a spike of one batch, not a loss that rises."""

import math
from dataclasses import dataclass

from trainwright.events.smoothing import HistoryBuffer, median

WINDOW, MIN_VALUES = 100, 30
_TIMES, _DEVIATIONS = 3.0, 20.0


@dataclass(frozen=True, slots=True)
class Spike:
    """The largest of ``count`` losses above the limit; ``typical`` is the median of the ``window`` values before."""

    iteration: int
    value: float
    typical: float
    window: int
    count: int

    def __str__(self) -> str:
        times = f"{self.value / self.typical:.3g} times " if self.typical > 0 else ""
        against = f"the median of the last {self.window}" + ("" if times else f" is {self.typical:.4g}")
        return f"{self.value:.4g}, {times}{against}"


def largest_spike(history: HistoryBuffer, first: int) -> Spike | None:
    """The largest of the values from iteration ``first`` on that is far above the 100 values before ``first``.

    Far above: above three times their median, and more than 20 standard deviations away from it, estimated as 1.4826
    times the median absolute deviation (Rousseeuw and Croux 1993), so that earlier spikes do not count. None, too, with
    fewer than 30 values before.
    """
    new = history.values_since(first)
    if not new:
        return None
    before = [value for value in history.last_values(len(new) + WINDOW)[: -len(new)] if math.isfinite(value)]
    if len(before) < MIN_VALUES:
        return None
    typical = median(before)
    margin = (_TIMES - 1) * abs(typical)
    found = [(value, at) for value, at in new if math.isfinite(value) and value > typical + margin]
    if not found:
        return None
    deviation = 1.4826 * median([abs(value - typical) for value in before])
    limit = typical + max(margin, _DEVIATIONS * deviation)
    found = [(value, at) for value, at in found if value > limit > typical]
    if not found:
        return None
    value, iteration = max(found)
    return Spike(iteration, value, typical, len(before), len(found))
