"""Tensors are counted as long as they exist, and what processes exchange by its kind."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from trainwright.inspect.simulation.process import simulated_process
from trainwright.inspect.simulation.step_cost import TensorBytes, counting

MIB = 2**20


@contextmanager
def counted_process(rank: int = 0, world_size: int = 1) -> Iterator[TensorBytes]:
    with simulated_process(rank, world_size), counting() as counted:
        yield counted


@pytest.mark.exhaustive
def test_tensors_count_until_they_are_freed() -> None:
    with counted_process() as counted:
        first = torch.zeros(MIB // 4)
        view = first[:10]
        assert counted.now == MIB
        second = first + 1
        assert counted.now == counted.peak == 2 * MIB
        del second
        assert counted.now == MIB
        del first
        assert counted.now == MIB  # of the view
        del view
        gc.collect()
        assert counted.now == 0
        assert counted.peak == 2 * MIB


def test_storages_that_change_their_size() -> None:
    with counted_process() as counted:
        tensor = torch.zeros(MIB // 4)
        tensor.untyped_storage().resize_(0)
        assert counted.now == 0
        tensor.untyped_storage().resize_(MIB)
        assert counted.now == MIB


def test_traffic_by_kind() -> None:
    with counted_process(rank=5, world_size=64) as counted:
        assert (dist.get_rank(), dist.get_world_size()) == (5, 64)
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        part, whole = torch.zeros(256), torch.zeros(64 * 256)
        counted.start()
        dist.all_reduce(part)
        dist.all_reduce(part)
        gather(whole, part)
        scatter(part, whole)
        dist.broadcast(part, 0)
        sizes = {"all-reduce": 2048, "all-gather": 65536, "reduce-scatter": 65536, "broadcast": 1024}
        assert dict(counted.traffic) == sizes
