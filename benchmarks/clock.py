"""A clock that belongs to nobody who is timed: the data or the model tells when a step begins."""

import resource
import statistics
import time
from typing import Any

from torch import nn

CPU_TIME_EVERY = 50  # quick steps: asking for it is a system call
QUICK_NS = 5_000_000


class Clock:
    """Call it once in each step, at the same place of it; the time between two calls is one step.

    ``stride``: calls that make one round. With gradient accumulation not all micro-batches do the same.
    """

    def __init__(self) -> None:
        self.wall: list[int] = []  # ns of a clock that is the same in all processes of the machine
        self.cpu: list[tuple[int, int]] = []  # (calls before, ns)

    def __call__(self) -> None:
        wall, now = self.wall, time.perf_counter_ns()
        if len(wall) % CPU_TIME_EVERY == 0 or now - wall[-1] > QUICK_NS:
            self.cpu.append((len(wall), time.process_time_ns()))
            now = time.perf_counter_ns()
        wall.append(now)

    def figures(self, warm: int, stride: int = 1) -> dict[str, float]:
        """Microseconds of a step: median and mean of wall time, mean of CPU time; empty for too few steps.

        ``warm``: steps at the beginning that do not count.
        """
        wall = self.wall[warm:]
        rounds = [(b - a) / stride / 1e3 for a, b in zip(wall, wall[stride:], strict=False)]
        if not rounds:
            return {}
        figures = {"us": statistics.median(rounds), "mean_us": (wall[-1] - wall[0]) / (len(wall) - 1) / 1e3}
        cpu = [entry for entry in self.cpu if entry[0] >= warm]
        if len(cpu) > 1:
            figures["cpu_us"] = (cpu[-1][1] - cpu[0][1]) / (cpu[-1][0] - cpu[0][0]) / 1e3
        return figures

    def us_between_lines(self, log_every: int) -> float | None:
        """Microseconds of a step from behind the first line of the log to behind the last; None for fewer than two.

        For a GPU: the host runs ahead of it, and has waited for it where it has just written a line.
        """
        marks = self.wall[log_every + 2 :: log_every]
        return (marks[-1] - marks[0]) / (len(marks) - 1) / log_every / 1e3 if len(marks) > 1 else None


def timed(net: nn.Module, clock: Clock) -> nn.Module:
    """``net``, whose forward pass tells the clock: for data from which whole batches are picked without a call."""
    untimed = type(net)

    def forward(self: Any, *inputs: Any) -> Any:
        clock()
        return untimed.forward(self, *inputs)

    net.__class__ = type(f"Timed{untimed.__name__}", (untimed,), {"forward": forward})
    return net


def peak_mib() -> float:
    """The highest resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
