"""Counts per step: Python calls, launches on a GPU, synchronizations with it."""

import itertools
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from benchmarks.job import Job
from benchmarks.models import flops_of_step

# The profiler's names of the calls by which the host starts work on a GPU.
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch")
CALLS_OF_CLOCK = 3  # Python calls of the clock in each step
COPIES = ("cudaMemcpyAsync", "cudaMemsetAsync")


def calls(job: Job, train: Callable[[], object]) -> dict[str, Any]:
    """Calls of Python functions in a step of ``train()``: ``calls``, the median, and ``packages``, the mean of each.

    Resumed generators count as calls, C functions do not.
    """
    counts: defaultdict[str, int] = defaultdict(int)
    at_tick: list[dict[str, int]] = []

    def record(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            counts[frame.f_globals.get("__name__", "?").partition(".")[0]] += 1

    _at_each_tick(job, lambda step: at_tick.append(dict(counts)))
    sys.setprofile(record)
    try:
        train()
    finally:
        sys.setprofile(None)
    measured = at_tick[job.warm :]
    steps = list(itertools.pairwise(measured))
    totals = [sum(now.values()) - sum(before.values()) - CALLS_OF_CLOCK for before, now in steps]
    first, last = measured[0], measured[-1]
    means = {name: (count - first.get(name, 0)) / len(steps) for name, count in last.items()}
    means["benchmarks"] -= CALLS_OF_CLOCK
    packages = sorted(((name, mean) for name, mean in means.items() if mean >= 0.5), key=lambda item: -item[1])
    return {"calls": statistics.median(totals), "packages": dict(packages)}


def launches(job: Job, train: Callable[[], object]) -> dict[str, Any]:
    """``launches``: kernels, graphs and copies that the host starts in a step; ``gpu_mib``: peak memory of the GPU;
    ``flops``: of a step.
    """
    first, last = job.warm, job.steps - 2
    seen = {torch.profiler.ProfilerActivity.CPU}
    if job.device != "cpu":
        seen.add(torch.profiler.ProfilerActivity.CUDA)
    profiler = torch.profiler.profile(activities=seen)

    def at_tick(step: int) -> None:
        if step == first:
            profiler.start()
        elif step == last:
            profiler.stop()

    _at_each_tick(job, at_tick)
    train()
    events = {event.key: event.count for event in profiler.key_averages()}
    started = sum(count for name, count in events.items() if name in LAUNCHES + COPIES)
    gpu_mib = torch.cuda.max_memory_allocated() / 2**20 if job.device != "cpu" else 0.0
    return {"launches": started / (last - first), "gpu_mib": gpu_mib, "flops": flops_of_step(job.model, job.batch)}


def syncs(job: Job, train: Callable[[], object]) -> dict[str, Any]:
    """Raise torch's error if a step waits for the GPU, except steps that write a log line."""

    def at_tick(step: int) -> None:
        place = step % job.log_every
        is_between = step > job.log_every and 2 <= place <= job.log_every - 3
        torch.cuda.set_sync_debug_mode("error" if is_between else "default")

    _at_each_tick(job, at_tick)
    train()
    return {}


def _at_each_tick(job: Job, call: Callable[[int], object]) -> None:
    """Call ``call`` with the number of the step, from 0, at each call of the clock."""
    clock_class = type(job.clock)

    class ObservedClock(clock_class):  # type: ignore[misc, valid-type]
        def __call__(self) -> None:
            call(len(self.wall))
            super().__call__()

    job.clock.__class__ = ObservedClock
