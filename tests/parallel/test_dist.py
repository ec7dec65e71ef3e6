"""Ranks and what they exchange: on two processes, and on one, where each exchange is the identity."""

import os
import time
from typing import Any

import pytest
import torch

from tests.ranks import on_ranks
from trainwright.base import dist
from trainwright.parallel.layout import Layout
from trainwright.parallel.mesh import use_layout


def test_a_single_process_is_the_main_one_and_exchanges_with_itself() -> None:
    value = {"a": [1, 2]}
    assert (dist.get_rank(), dist.get_world_size(), dist.get_data_parallel_rank()) == (0, 1, 0)
    assert dist.get_data_parallel_size() == 1
    assert dist.is_main_process()
    assert dist.all_gather_object(value) == [value]
    assert dist.broadcast_object(value) is value
    assert [dist.is_any(False), dist.is_any(True)] == [False, True]
    dist.synchronize()


def test_the_local_rank_is_the_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert dist.get_local_rank() == 0
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert dist.get_local_rank() == 3


def test_a_barrier_of_nccl_is_told_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or it warns, and guesses one from the rank."""
    calls: list[Any] = []

    class Group:
        def get_world_size(self) -> int:
            return 2

        def get_backend(self) -> str:
            return self.backend

        def barrier(self, device_ids: Any) -> None:
            calls.append(device_ids)

    group = Group()
    monkeypatch.setattr(dist, "_torch_dist", lambda: group)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    for group.backend in ("gloo", "nccl"):
        dist.synchronize()
    assert calls == [None, [3]]


def broadcast_part(rank: int) -> list[float]:
    """A buffer of which tensor ranks have parts, as the first data rank has it."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh = use_layout(Layout(data=2, zero_stage=1), "cpu")
    assert mesh is not None
    part = DTensor.from_local(torch.full((2,), float(rank)), mesh.device_mesh["tp"], [Replicate()], run_check=False)
    dist.broadcast_over_data(part.detach())
    return part.to_local().tolist()


def exchanges() -> dict[str, Any]:
    rank = dist.get_rank()
    if rank == 1:
        time.sleep(0.2)
    before = time.time()
    dist.synchronize()
    return {
        "rank": (rank, dist.get_world_size(), dist.is_main_process(), int(os.environ["RANK"])),
        "share": (dist.get_data_parallel_rank(), dist.get_data_parallel_size()),
        "all": dist.all_gather_object({"rank": rank}),
        "first": dist.broadcast_object([rank, "of rank 0"]),
        "any": [dist.is_any(False), dist.is_any(rank == 0), dist.is_any(rank == 1), dist.is_any(True)],
        "buffer": broadcast_part(rank),
        "times": dist.all_gather_object((before, time.time())),
    }


def test_two_ranks_exchange_values() -> None:
    first, second = on_ranks(exchanges)
    assert (first["rank"], second["rank"]) == ((0, 2, True, 0), (1, 2, False, 1))
    assert (first["share"], second["share"]) == ((0, 2), (1, 2))
    assert first["all"] == second["all"] == [{"rank": 0}, {"rank": 1}]
    assert first["first"] == second["first"] == [0, "of rank 0"]
    assert first["any"] == second["any"] == [False, True, True, True]
    assert first["buffer"] == second["buffer"] == [0.0, 0.0]
    (_, continued), (arrived, _) = first["times"]
    assert continued >= arrived  # rank 0 has waited for rank 1


def exchanges_of_parts() -> list[Any]:
    """Values of several sizes between all ranks, and between two of which rank 0 is none."""
    rank = dist.get_rank()
    pair = torch.distributed.new_group([1, 2])
    sizes = 10, 20_000  # by way of one rank, and of all
    found: list[Any] = [dist.all_gather_object(f"{rank}" * size) for size in sizes]
    if rank > 0:
        found += [dist.all_gather_object(f"{rank}" * size, pair) for size in sizes]
        found += [dist.is_same(b"equal", pair), dist.is_same(bytes([rank]), pair)]
    found += [dist.is_same(b"equal"), dist.is_same(bytes([rank > 1]))]
    rows = dist.gather_bytes(torch.full((rank,), rank, dtype=torch.uint8), 2)
    group = dist.new_cpu_group()
    contents = [dist.gather_content(bytes([rank]) * size * (rank + 1), 3 * size, group) for size in sizes]
    return [*found, [row.tolist() for row in rows], [[len(row.rstrip(b"\0")) for row in one] for one in contents]]


def test_ranks_of_a_group_exchange_values_of_any_size() -> None:
    first, second, third = on_ranks(exchanges_of_parts, world_size=3)
    of_all = [[f"{rank}" * size for rank in range(3)] for size in (10, 20_000)]
    of_pair = [row[1:] for row in of_all]
    assert first == [*of_all, True, False, [[0, 0], [1, 0], [2, 2]], [[0, 20, 30], [0, 40_000, 60_000]]]
    assert second == third == [*of_all, *of_pair, True, False, True, False, [], [[], []]]


class UnpicklableError(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("not to be sent")


def blocks_that_fail() -> list[str]:
    found = []
    for failing, kind in (((), ValueError), ((1,), ValueError), ((0, 1), ValueError), ((1,), UnpicklableError)):
        try:
            with dist.raised_together():
                if dist.get_rank() in failing:
                    raise kind(f"of rank {dist.get_rank()}")
            found.append("no error")
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def test_the_error_of_a_rank_is_raised_on_all() -> None:
    first, second = on_ranks(blocks_that_fail)
    assert first[:3] == ["no error", "ValueError: of rank 1", "ValueError: of rank 0"]
    assert second[:3] == ["no error", "ValueError: of rank 1", "ValueError: of rank 0"]
    assert first[3] == "RuntimeError: rank 1: UnpicklableError: of rank 1"
    assert second[3] == "UnpicklableError: of rank 1"
    with pytest.raises(ValueError, match="alone"), dist.raised_together():
        raise ValueError("alone")
