"""A clock that is independent of the timed trainer: the data or the model calls it at the start of each step."""

import resource
import statistics
import time
from typing import Any

from torch import nn

CPU_TIME_EVERY = 50  # fast steps: reading the CPU time is a system call
FAST_NS = 5_000_000


class Clock:
    """Call it once in each step, at the same place; the time between two calls is one step.

    ``stride``: calls per update. With gradient accumulation the micro-batches of an update differ.
    """

    def __init__(self) -> None:
        self.wall: list[int] = []  # ns of a clock that all processes of the machine share
        self.cpu: list[tuple[int, int]] = []  # (calls before, ns)

    def __call__(self) -> None:
        wall, now = self.wall, time.perf_counter_ns()
        if len(wall) % CPU_TIME_EVERY == 0 or now - wall[-1] > FAST_NS:
            self.cpu.append((len(wall), time.process_time_ns()))
            now = time.perf_counter_ns()
        wall.append(now)

    def metrics(self, warm: int, stride: int = 1) -> dict[str, float]:
        """Microseconds of a step: median and mean of wall time, mean of CPU time; empty for too few steps.

        ``warm``: warm-up steps to exclude.
        """
        wall = self.wall[warm:]
        rounds = [(b - a) / stride / 1e3 for a, b in zip(wall, wall[stride:], strict=False)]
        if not rounds:
            return {}
        metrics = {"us": statistics.median(rounds), "mean_us": (wall[-1] - wall[0]) / (len(wall) - 1) / 1e3}
        cpu = [entry for entry in self.cpu if entry[0] >= warm]
        if len(cpu) > 1:
            metrics["cpu_us"] = (cpu[-1][1] - cpu[0][1]) / (cpu[-1][0] - cpu[0][0]) / 1e3
        return metrics

    def us_between_lines(self, log_every: int) -> float | None:
        """Microseconds of a step, from after the first log line to after the last; None for fewer than two lines.

        For a GPU: the host runs ahead of the device, and is synchronized with it after a log line.
        """
        marks = self.wall[log_every + 2 :: log_every]
        return (marks[-1] - marks[0]) / (len(marks) - 1) / log_every / 1e3 if len(marks) > 1 else None


def timed(net: nn.Module, clock: Clock) -> nn.Module:
    """``net`` with a forward pass that calls the clock, for data that is read without a call of our code."""
    untimed = type(net)

    def forward(self: Any, *inputs: Any) -> Any:
        clock()
        return untimed.forward(self, *inputs)

    net.__class__ = type(f"Timed{untimed.__name__}", (untimed,), {"forward": forward})
    return net


def peak_mib() -> float:
    """Peak resident memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
