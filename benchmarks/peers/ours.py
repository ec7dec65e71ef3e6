"""Shared by our two APIs: the form of the data, and a hook that calls the clock if no benchmark code runs in a step."""

from collections.abc import Callable
from typing import Any

from benchmarks.clock import Clock
from benchmarks.job import PICKED, Job, as_it_is
from trainwright.data import ColumnDataset
from trainwright.hooks import HookBase


class Ticks(HookBase):
    def __init__(self, clock: Clock) -> None:
        self.after_step = clock  # type: ignore[method-assign]


def data_of(job: Job) -> tuple[Any, Callable[[Any], Any] | None]:
    """The dataset, and its collate function if it needs one."""
    if job.data == "batches":
        return job.batches(), as_it_is
    if job.data == "columns":
        x, labels = job.tensors()
        return ColumnDataset(x=x, labels=labels), None
    return job.dataset(), None


def add_hooks(trainer: Any, job: Job) -> None:
    """Add the job's hooks, and one that calls the clock for a compiled step (no forward call) on data in tensors (no
    dataset call).
    """
    trainer.register_hooks(job.hooks)
    if job.is_compiled and job.data in PICKED:
        trainer.register_hooks([Ticks(job.clock)])
