"""The time that a training spends in each phase, and what the process does now besides steps."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal


@dataclass(slots=True)
class PhaseTimes:
    """Seconds that the training process has spent in each phase since the training started.

    ``data``: waiting for a batch and moving it to the device. ``forward``, ``backward``, ``optimizer``: the parts
    of a step; ``forward`` is the complete step where it is not divided (graph mode, a custom step). ``waiting``: in
    a step, for other pipeline stages, with the exchange between them. ``metrics``: the training metrics of the
    Python API, with the import of the package that computes them. ``compile``: compilation in graph mode, which
    happens inside steps and is in no other phase. ``hooks``: everything between two steps, including
    ``evaluation``, ``save`` and ``imports``, which are also counted on their own. ``imports``: loading packages
    that an evaluation or a save uses for the first time; it is not part of these two.

    On an accelerator these are host times; the host runs ahead of the device.
    """

    data: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    waiting: float = 0.0
    optimizer: float = 0.0
    metrics: float = 0.0
    hooks: float = 0.0
    evaluation: float = 0.0
    save: float = 0.0
    imports: float = 0.0
    compile: float = 0.0

    @property
    def step(self) -> float:
        """Time in steps, without the hooks between them."""
        return sum((self.data, self.forward, self.backward, self.waiting, self.optimizer, self.metrics, self.compile))

    @property
    def total(self) -> float:
        """Time in all phases."""
        return self.step + self.hooks

    def count_compile(self, seconds: float) -> None:
        self.compile += seconds

    @contextmanager
    def counting(self, phase: Literal["evaluation", "save"]) -> Iterator[None]:
        """Add the seconds of a ``with`` block to a rare phase: entering the block costs a microsecond."""
        start, imported = time.perf_counter(), _of_process.imports
        try:
            with activity(phase):
                yield
        finally:
            imports = _of_process.imports - imported
            self.imports += imports
            setattr(self, phase, getattr(self, phase) + time.perf_counter() - start - imports)


_of_process = PhaseTimes()  # the `imports` of all trainings


@contextmanager
def importing() -> Iterator[None]:
    """Count the seconds of a ``with`` block, which loads a package, as ``imports``, not in the phase around it."""
    start, before = time.perf_counter(), _of_process.imports
    try:
        with activity("import"):
            yield
    finally:
        _of_process.imports = before + time.perf_counter() - start  # blocks may be nested


@dataclass(slots=True, eq=False)
class Activity:
    """What the process does besides steps, for a progress bar: ``done`` of ``total`` parts, if it has parts."""

    name: str
    start: float  # seconds
    total: int | None = None
    done: int = 0


activities: list[Activity] = []

"""The current activities, the innermost last. A progress bar reads them from its own thread."""

_ended_s = 0.0  # in activities that have ended


def aside_s() -> float:
    """Seconds of this process in activities, the current one included."""
    return _ended_s + (time.monotonic() - activities[0].start if activities else 0.0)


@contextmanager
def activity(name: str, total: int | None = None) -> Iterator[Activity]:
    """Show a ``with`` block, which is no step and may take long, in the progress bar."""
    current = Activity(name, time.monotonic(), total)
    activities.append(current)
    try:
        yield current
    finally:
        is_outermost = activities[0] is current
        activities.remove(current)
        if is_outermost:
            global _ended_s
            _ended_s += time.monotonic() - current.start
