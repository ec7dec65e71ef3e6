"""Where the time of a training goes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal


@dataclass(slots=True)
class PhaseTimes:
    """Seconds that the process which trains has spent in each phase, since the training began.

    ``data``: waiting for a batch and bringing it to the device. ``forward``, ``backward``, ``optimizer``: of the step;
    ``forward`` holds all of a step that nobody divides (a graph, a step of the user's own). ``hooks``: all that comes
    between two steps, ``evaluation`` and ``save`` included, which are also counted by themselves.

    On an accelerator these are times of the host, which runs ahead of it.
    """

    data: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    optimizer: float = 0.0
    hooks: float = 0.0
    evaluation: float = 0.0
    save: float = 0.0

    @property
    def step(self) -> float:
        """Of steps, without what is between them."""
        return self.data + self.forward + self.backward + self.optimizer

    @property
    def total(self) -> float:
        """All of it."""
        return self.step + self.hooks

    @contextmanager
    def counting(self, phase: Literal["evaluation", "save"]) -> Iterator[None]:
        """Add the seconds of a ``with`` block to a phase that is rare: entering it costs a microsecond."""
        start = time.perf_counter()
        try:
            yield
        finally:
            setattr(self, phase, getattr(self, phase) + time.perf_counter() - start)
