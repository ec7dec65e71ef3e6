"""What can be counted in a step rather than timed: Python calls, launches on a GPU, waits for it."""

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

# By what the host tells a GPU to do something, as the profiler names it.
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch")
OF_THE_CLOCK = 3  # Python calls of being told a step
COPIES = ("cudaMemcpyAsync", "cudaMemsetAsync")


def calls(job: Job, train: Callable[[], object]) -> dict[str, Any]:
    """Calls of Python functions in a step of ``train()``: ``calls``, the median, and ``packages``, the mean of each.

    Generators that go on count as calls, functions in C do not.
    """
    counts: defaultdict[str, int] = defaultdict(int)
    at_tick: list[dict[str, int]] = []

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            counts[frame.f_globals.get("__name__", "?").partition(".")[0]] += 1

    _at_each_tick(job, lambda step: at_tick.append(dict(counts)))
    sys.setprofile(note)
    try:
        train()
    finally:
        sys.setprofile(None)
    settled = at_tick[job.warm :]
    steps = list(itertools.pairwise(settled))
    totals = [sum(now.values()) - sum(before.values()) - OF_THE_CLOCK for before, now in steps]
    first, last = settled[0], settled[-1]
    means = {name: (count - first.get(name, 0)) / len(steps) for name, count in last.items()}
    means["benchmarks"] -= OF_THE_CLOCK
    packages = sorted(((name, mean) for name, mean in means.items() if mean >= 0.5), key=lambda item: -item[1])
    return {"calls": statistics.median(totals), "packages": dict(packages)}


def launches(job: Job, train: Callable[[], object]) -> dict[str, Any]:
    """What the host starts on the GPU in a step, kernels, graphs and copies, as ``launches``; and ``gpu_mib``, the peak
    of the GPU's memory; ``flops`` of a step.
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
    """End the training with torch's error where a step waits for the GPU, the steps with a line of the log excepted."""

    def at_tick(step: int) -> None:
        place = step % job.log_every
        is_between = step > job.log_every and 2 <= place <= job.log_every - 3
        torch.cuda.set_sync_debug_mode("error" if is_between else "default")

    _at_each_tick(job, at_tick)
    train()
    return {}


def _at_each_tick(job: Job, call: Callable[[int], object]) -> None:
    """Call with the number of the step, from 0 on, whenever the clock is told of one."""
    untold = type(job.clock)

    class ToldClock(untold):  # type: ignore[misc, valid-type]
        def __call__(self) -> None:
            call(len(self.wall))
            super().__call__()

    job.clock.__class__ = ToldClock
