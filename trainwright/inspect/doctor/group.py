"""What the ranks measure together: the speed of an all-reduce, and the differences of their clocks."""

import statistics
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from trainwright.base.dist import broadcast_object, synchronize

_SIZES = (1, 4, 16, 64)  # MB
_ENOUGH_S = 0.3


@dataclass(frozen=True)
class Speed:
    """Of an all-reduce over all ranks: seconds for one value, and for ``size_bytes``."""

    latency_s: float
    size_bytes: int
    time_s: float

    @property
    def bytes_per_s(self) -> float:
        return self.size_bytes / self.time_s


def measure_all_reduce(device: torch.device) -> Speed:
    """Every rank must call this. Larger tensors are tried until one takes a third of a second."""
    latency = statistics.median(_time_of_all_reduce(1, device) for _ in range(20))
    for size in _SIZES:
        values = size * 250_000  # float32
        _time_of_all_reduce(values, device)  # the first one allocates
        seconds = torch.tensor([min(_time_of_all_reduce(values, device) for _ in range(3))], device=device)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)  # the same decision on all ranks
        if seconds.item() > _ENOUGH_S:
            break
    return Speed(latency, values * 4, seconds.item())


def _time_of_all_reduce(values: int, device: torch.device) -> float:
    tensor = torch.zeros(values, device=device)
    _wait(device)
    start = time.perf_counter()
    dist.all_reduce(tensor)
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()


def measure_clock() -> float:
    """This rank's clock minus that of rank 0, in seconds. Every rank must call this.

    The smallest of five differences after a barrier, which the ranks leave within milliseconds.
    """
    differences = []
    for _ in range(5):
        synchronize()
        now = time.time()
        differences.append(now - broadcast_object(now))
    return min(differences, key=abs)
