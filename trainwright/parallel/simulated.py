"""Whether this process is simulated for an estimate: there are no others, and tensors have no values."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Simulation:
    """What a simulated process does in another way.

    Attributes:
        replica: called in place of ``DistributedDataParallel``.
        pipeline: called in place of ``Pipeline``.
    """

    replica: Callable[..., nn.Module]
    pipeline: Callable[..., Any]


_active: ContextVar[Simulation | None] = ContextVar("simulation", default=None)


def simulation() -> Simulation | None:
    """The simulation that this process is in; None: the process is a real one."""
    return _active.get()


@contextmanager
def simulated(active: Simulation) -> Iterator[None]:
    token = _active.set(active)
    try:
        yield
    finally:
        _active.reset(token)
