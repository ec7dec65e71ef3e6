"""Whether this process is simulated for an estimate: there are no others, and tensors have no values."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import nn


def _ignore(_: nn.Module) -> None: ...


@dataclass(frozen=True)
class Simulation:
    """What a simulated process does in another way.

    Attributes:
        replica: called in place of ``DistributedDataParallel``.
        pipeline: called in place of ``Pipeline``.
        before_spread: called with a model before it is spread, in place of sharing the weights.
        after_cut: called with each stage of a pipeline.
    """

    replica: Callable[..., nn.Module]
    pipeline: Callable[..., Any]
    before_spread: Callable[[nn.Module], object] = _ignore
    after_cut: Callable[[Any], object] = _ignore


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
