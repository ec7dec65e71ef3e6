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
    ``forward`` holds all of a step that nobody divides (a graph, a step of the user's own). ``metrics``: what the
    objects door makes of each batch's scores, with the import of what computes it. ``compile``: making the programs of
    graph mode, which comes in steps and is in no other phase. ``hooks``: all that comes between two steps,
    ``evaluation`` and ``save`` included, which are also counted by themselves.

    On an accelerator these are times of the host, which runs ahead of it.
    """

    data: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    optimizer: float = 0.0
    metrics: float = 0.0
    hooks: float = 0.0
    evaluation: float = 0.0
    save: float = 0.0
    compile: float = 0.0

    @property
    def step(self) -> float:
        """Of steps, without what is between them."""
        return self.data + self.forward + self.backward + self.optimizer + self.metrics + self.compile

    @property
    def total(self) -> float:
        """All of it."""
        return self.step + self.hooks

    def count_compile(self, seconds: float) -> None:
        """Count them here, and not in ``forward``, to which the step that they are in is added as a whole."""
        self.compile += seconds
        self.forward -= seconds

    @contextmanager
    def counting(self, phase: Literal["evaluation", "save"]) -> Iterator[None]:
        """Add the seconds of a ``with`` block to a phase that is rare: entering it costs a microsecond."""
        start = time.perf_counter()
        try:
            yield
        finally:
            setattr(self, phase, getattr(self, phase) + time.perf_counter() - start)
