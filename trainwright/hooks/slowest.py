"""Which hook takes the most time: found out in a few iterations, so that the others need not be timed."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from trainwright.events.phases import PhaseTimes

Call = Callable[[], None]


class HookClock:
    """Stands in for the calls of ``iterations`` steps, in the lists that the training's loop goes through.

    Evaluations and saves do not count: they have phases of their own.

    Args:
        lists: what is called before each step, and what after it; changed in place, and at the end as they were.
    """

    def __init__(self, lists: Sequence[list[Call]], phases: PhaseTimes, iterations: int) -> None:
        self._lists = [(calls, calls.copy()) for calls in lists]
        self._phases, self._left = phases, iterations
        self.seconds: dict[str, float] = {}
        for calls, _ in self._lists:
            calls[:] = [self._timed(call) for call in calls]
        if self._lists and lists[-1]:
            lists[-1][0] = self._counted(lists[-1][0])

    def stop(self) -> None:
        """Put the calls back."""
        for calls, as_they_were in self._lists:
            calls[:] = as_they_were
        self._lists = []

    def slowest(self) -> tuple[str, float] | None:
        """The name of the hook that took longest, and its share of the time of all, in (0, 1]; None without any."""
        total = sum(self.seconds.values())
        name = max(self.seconds, key=self.seconds.__getitem__, default=None)
        return None if name is None or total <= 0 else (name, self.seconds[name] / total)

    def _timed(self, call: Call) -> Call:
        phases, seconds, name = self._phases, self.seconds, _name_of(call)

        def timed() -> None:
            apart = phases.evaluation + phases.save
            start = time.perf_counter()
            call()
            took = time.perf_counter() - start - (phases.evaluation + phases.save - apart)
            seconds[name] = seconds.get(name, 0.0) + took

        return timed

    def _counted(self, call: Call) -> Call:
        def counted() -> None:
            call()
            self._left -= 1
            if self._left == 0:
                self.stop()

        return counted


def _name_of(call: Any) -> str:
    owner = getattr(call, "__self__", None)
    return type(owner).__name__ if owner is not None else getattr(call, "__qualname__", repr(call))
