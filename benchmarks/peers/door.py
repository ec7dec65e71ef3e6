"""What our two doors share: how the data are given, and what tells the clock where no code of ours is called."""

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
    """The data set, and its collate function if it needs one."""
    if job.data == "batches":
        return job.batches(), as_it_is
    if job.data == "columns":
        x, labels = job.tensors()
        return ColumnDataset(x=x, labels=labels), None
    return job.dataset(), None


def add_ticks(trainer: Any, job: Job) -> None:
    """A compiled step calls no forward pass; where it picks its batches out of tensors, a hook tells the clock."""
    if job.is_compiled and job.data in PICKED:
        trainer.register_hooks([Ticks(job.clock)])
