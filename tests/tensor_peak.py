"""The measured peak of a training step on one process: what torch's allocator on the CPU has given out."""

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from trainwright.hooks import HookBase

MARK = 1_234_567  # bytes: a tensor of this size marks a place among the events, whose times are not exact


class MarkThird(HookBase):
    """Marks the third step in the profile: data parallelism and optimizers are in their steady state."""

    def before_step(self) -> None:
        if self.trainer.iter == 2:
            torch.empty(MARK, dtype=torch.uint8)

    def after_step(self) -> None:
        if self.trainer.iter == 2:
            torch.empty(MARK, dtype=torch.uint8)


def measured_peak(build: Callable[[], Any]) -> int:
    """The most bytes that exist at once in the third step of the training of ``build()``, on one process.

    It is what torch's allocator has given out, by torch's profiler, which records what this thread allocates and frees.
    """
    gc.collect()  # tensors of an earlier profile that are freed in this one would count as negative
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as recorded:
        trainer = build()
        trainer.register_hooks([MarkThird()])
        trainer.train()
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    first, last = (place for place, size in enumerate(sizes) if size == -MARK)
    return max(sum(sizes[: place + 1]) for place in range(first, last - 1))
