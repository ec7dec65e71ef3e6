"""Where a run is, how fast it is, and how long the rest takes."""

import math
import time
from collections import deque
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

from trainwright.events.phases import imported_s

_RATE_S = 10.0  # the rate is that of the last seconds
_SHORTEST_S = 0.01  # no rate over less


class Position(NamedTuple):
    """Iterations done of the run; ``start``: those of earlier runs; ``per_epoch``: None if there are no epochs.

    Where the samples are no multiple of the batch, epochs end within an iteration, and ``per_epoch`` is a fraction: an
    iteration belongs to the epoch of its first sample.
    """

    done: int
    total: int
    start: int = 0
    per_epoch: int | Fraction | None = None

    @property
    def epoch(self) -> int:
        """From 1."""
        return self._epoch_of(self.done)

    @property
    def num_epochs(self) -> int:
        return self._epoch_of(self.total)

    def _epoch_of(self, done: int) -> int:
        return 1 if self.per_epoch is None else max(0, min(done, self.total) - 1) // self.per_epoch + 1

    @property
    def of_epoch(self) -> tuple[int, int]:
        """Iterations done of the epoch, or of the run if it has no epochs, and their number."""
        if self.per_epoch is None:
            return self.done, self.total
        first, end = (math.ceil(epoch * self.per_epoch) for epoch in (self.epoch - 1, self.epoch))
        return self.done - first, min(end, self.total) - first


class Rate:
    """Iterations per second of training, without evaluations, saves and compilation; and the time left.

    ``clock`` returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._start = self._last = clock()
        self._first_done = -1
        self._aside_s = 0.0  # in evaluations and the like, since the first iteration
        self._points: deque[tuple[float, int]] = deque()  # seconds of training, iterations

    @property
    def elapsed_s(self) -> float:
        return self._clock() - self._start

    def update(self, done: int, *, is_aside: bool) -> None:
        """Call it regularly. ``is_aside``: the process does something else than steps."""
        now, before = self._clock(), self._last
        self._last = now
        if is_aside:
            self._aside_s += now - before
        if self._first_done < 0:
            self._first_done = done
        if done <= (self._points[-1][1] if self._points else self._first_done):
            return
        self._points.append((now - self._aside_s, done))
        while len(self._points) > 2 and self._points[-1][0] - self._points[0][0] > _RATE_S:
            self._points.popleft()

    @property
    def per_s(self) -> float | None:
        """None: unknown before two iterations; the first one does not count, as it loads and compiles."""
        if len(self._points) < 2:
            return None
        (first_s, first), (last_s, last) = self._points[0], self._points[-1]
        # Between two drawings the process may have done little else than evaluate or save.
        return (last - first) / (last_s - first_s) if last_s - first_s > _SHORTEST_S else None

    def left_s(self, iterations: int, *, with_evaluations: bool) -> float:
        """Seconds until ``iterations`` more are done, once the rate is known; evaluations take their share so far."""
        last_s, done = self._points[-1]
        since = self._last - self._aside_s - last_s
        aside = self._aside_s / max(1, done - self._first_done) * iterations if with_evaluations else 0.0
        return max(0.0, iterations / (self.per_s or math.inf) - since) + aside


class TimeLeft:
    """The time left by the rate of the last lines of this process, with evaluations and saves."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, int]] = deque(maxlen=20)  # seconds, iterations

    def text(self, done: int, total: int) -> str:
        """``ETA 1:02``; empty while no rate is known, and for less than a second."""
        now = time.monotonic() - imported_s()  # which happens once
        start_s, start = self._points[0] if self._points else (now, done)
        self._points.append((now, done))
        left_s = (now - start_s) / (done - start) * (total - done) if done > start else 0.0
        return f"ETA {clock(left_s)}" if left_s >= 1 else ""


def speed(rate: float) -> str:
    """``12.3 it/s``, ``1.25 s/it``."""
    number, unit = (rate, "it/s") if rate >= 1 else (1 / rate, "s/it")
    return f"{number:#.3g}".rstrip(".") + f" {unit}" if number < 999.5 else f"{number:.0f} {unit}"


def clock(seconds: float) -> str:
    """``0:14``, ``1:02:03``."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"


def throughput(per_s: float) -> str:
    return f"{per_s:,.0f} samples/s" if per_s >= 1000 else f"{per_s:.4g} samples/s"
