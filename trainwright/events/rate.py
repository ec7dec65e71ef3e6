"""Where a run is, how fast it is, and how long the rest takes."""

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple

from trainwright.events.epoch_means import EpochLength, epoch_at, first_of_epoch
from trainwright.events.phases import PhaseTimes, aside_s

_RATE_S, _POINTS = 10.0, 20  # the rate is that of the last seconds, or points
_SHORTEST_S = 0.01  # no rate over less


class Position(NamedTuple):
    """Iterations done of the run; ``start``: those of earlier runs; ``per_epoch``: None if there are no epochs.

    Where the samples are no multiple of the batch, epochs end within an iteration, and ``per_epoch`` is a fraction: an
    iteration belongs to the epoch of its first sample.
    """

    done: int
    total: int
    start: int = 0
    per_epoch: EpochLength | None = None

    @property
    def epoch(self) -> int:
        """From 1."""
        return self._epoch_of(self.done)

    @property
    def num_epochs(self) -> int:
        return self._epoch_of(self.total)

    def _epoch_of(self, done: int) -> int:
        last = max(0, min(done, self.total) - 1)
        return 1 if self.per_epoch is None else epoch_at(self.per_epoch, last)[0] + 1

    @property
    def of_epoch(self) -> tuple[int, int]:
        """Iterations done of the epoch, or of the run if it has no epochs, and their number."""
        if self.per_epoch is None:
            return self.done, self.total
        first, end = (first_of_epoch(self.per_epoch, epoch) for epoch in (self.epoch - 1, self.epoch))
        return self.done - first, min(end, self.total) - first


class Rate:
    """Iterations per second of training, without evaluations, saves and compilation; and the time left.

    It is that of the last 20 updates, or 10 seconds if those are longer. The first iteration does not count, as it
    loads and compiles. ``done``: the iterations of earlier runs.
    """

    def __init__(self, done: int = 0) -> None:
        self._start, self._aside_before = time.monotonic(), aside_s()
        self._done = self._first_done = done
        self._points: deque[tuple[float, int]] = deque()  # seconds of steps, iterations
        self._interruptions: dict[str, _Interruptions] = {}
        self._lock = threading.Lock()  # a bar updates it in its own thread

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._start

    @property
    def _steps_s(self) -> float:
        return self.elapsed_s - (aside_s() - self._aside_before)

    def update(self, done: int, *, is_first: bool = False) -> None:
        """Call it regularly. ``is_first``: the first iteration has just ended."""
        with self._lock:
            if is_first:
                self._points.clear()
            elif done <= self._done:
                return
            self._done = done
            self._points.append((self._steps_s, done))
            while len(self._points) > _POINTS and self._points[-1][0] - self._points[1][0] > _RATE_S:
                self._points.popleft()

    @contextmanager
    def interrupted(self, kind: Literal["evaluation", "save"], phases: PhaseTimes, done: int) -> Iterator[None]:
        """Count a ``with`` block, which comes again, in ``phases`` and the time left. ``done``: iterations so far."""
        before = getattr(phases, kind)
        with phases.counting(kind):
            yield
        if done > self._first_done:  # an evaluation of the initial weights does not come again
            self.count(kind, done, getattr(phases, kind) - before)

    def count(self, kind: str, done: int, seconds: float) -> None:
        """Count an evaluation or a save after ``done`` iterations, which comes again."""
        self._interruptions.setdefault(kind, _Interruptions(self._first_done)).count(done, seconds)

    @property
    def per_s(self) -> float | None:
        """None: unknown before two iterations."""
        with self._lock:
            if len(self._points) < 2:
                return None
            (first_s, first), (last_s, last) = self._points[0], self._points[-1]
        # Between two drawings the process may have done little else than evaluate or save.
        return (last - first) / (last_s - first_s) if last_s - first_s > _SHORTEST_S else None

    def left_s(self, iterations: int, *, with_interruptions: bool = True) -> float:
        """Seconds until ``iterations`` more are done, with evaluations and saves as before; 0: unknown."""
        rate = self.per_s
        if rate is None:
            return 0.0
        last_s, done = self._points[-1]
        steps = max(0.0, iterations / rate - (self._steps_s - last_s))
        if not with_interruptions:
            return steps
        return steps + sum(kind.left_s(done + iterations) for kind in self._interruptions.values())

    def time_left(self, done: int, total: int) -> str:
        """``ETA 1:02`` for a line; empty while no rate is known, and for less than a second."""
        self.update(done)
        left_s = self.left_s(total - done)
        return f"ETA {clock(left_s)}" if left_s >= 1 else ""


@dataclass(slots=True)
class _Interruptions:
    """Those of one kind: their number, and the iterations done at the first and the last."""

    start: int  # the iterations done when the training began
    seconds: float = 0.0
    number: int = 0
    first: int = 0
    last: int = 0

    def count(self, done: int, seconds: float) -> None:
        self.seconds += seconds
        if not self.number:
            self.first = done
        if done != self.last:  # a save may have several parts
            self.number, self.last = self.number + 1, done

    def left_s(self, total: int) -> float:
        # One alone is taken for the first since the training began.
        period = (self.last - self.first) / (self.number - 1) if self.number > 1 else self.last - self.start
        return (total - self.last) // period * self.seconds / self.number


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
