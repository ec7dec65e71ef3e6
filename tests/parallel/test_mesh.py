"""The place of each process in the grid; a model on one process; connections that end when they are lost."""

import socket
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from torch import nn

from tests.ranks import on_ranks
from trainwright.base import dist
from trainwright.parallel.connections import end_lost_connections
from trainwright.parallel.layout import Layout
from trainwright.parallel.mesh import current_mesh, use_layout
from trainwright.parallel.parallelize import parallelize


def _places() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for layout in (
        Layout(data=4, replicate=2, zero_stage=3),
        Layout(data=2, replicate=2, tensor=2),
        Layout(pipeline=4),
        Layout(data=2, context=2, zero_stage=2),
    ):
        mesh = use_layout(layout, "cpu")
        assert mesh is not None
        assert mesh is current_mesh()
        rank = torch.tensor(float(dist.get_rank()))
        dist.reduce_over_data(rank)
        found[repr(layout)] = {
            "data": (dist.get_data_parallel_rank(), dist.get_data_parallel_size()),
            "tensor": (dist.get_tensor_parallel_rank(), dist.get_tensor_parallel_size()),
            "pipeline": (dist.get_pipeline_parallel_rank(), dist.get_pipeline_parallel_size()),
            "data ranks": dist.gather_over_data(dist.get_rank()),
            "their sum": rank.item(),
        }
    assert use_layout(Layout(data=4, replicate=4), "cpu") is None
    assert dist.get_data_parallel_size() == 4
    return found


def test_places_of_four_processes() -> None:
    ranks = on_ranks(_places, world_size=4)
    hybrid, tensor, stages, context = zip(*(found.values() for found in ranks), strict=True)
    assert [place["data"] for place in hybrid] == [(rank, 4) for rank in range(4)]
    assert [place["data ranks"] for place in hybrid] == [[0, 1, 2, 3]] * 4
    assert [place["their sum"] for place in hybrid] == [6.0] * 4
    assert [place["data"] for place in tensor] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert [place["tensor"] for place in tensor] == [(0, 2), (1, 2), (0, 2), (1, 2)]
    assert [place["data ranks"] for place in tensor] == [[0, 2], [1, 3]] * 2
    assert [place["pipeline"] for place in stages] == [(rank, 4) for rank in range(4)]
    assert [place["data"] for place in stages] == [(0, 1)] * 4
    assert [place["data"] for place in context] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert [place["data ranks"] for place in context] == [[0, 1, 2, 3]] * 4


def test_one_process_keeps_the_whole_model() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2)))
    autocast = partial(torch.autocast, "cpu", dtype=torch.bfloat16)
    names = list(model.state_dict())
    assert parallelize(model, torch.device("cpu"), recompute=True, autocast=autocast).recomputed == ["0", "1"]
    assert list(model.state_dict()) == names
    assert model(torch.ones(1, 2)).dtype == torch.bfloat16
    assert parallelize(model, torch.device("cpu")).recomputed == []  # without autocast again
    assert model(torch.ones(1, 2)).dtype == torch.float32


def limit_of(connection: socket.socket) -> int:
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)


def wait_for_limit(connection: socket.socket, milliseconds: int) -> None:
    end = time.monotonic() + 60
    while limit_of(connection) != milliseconds:
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.skipif(
    not sys.platform.startswith("linux") or not Path("/proc/self/fd").is_dir(), reason="finds the sockets by /proc"
)
def test_connections_of_now_and_later_are_limited_and_still_work() -> None:
    is_over, (one, other) = threading.Event(), socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as server, one, other:
        with socket.create_connection(server.getsockname()) as early:
            end_lost_connections(12, is_over=is_over)
            wait_for_limit(early, 12_000)
            with socket.create_connection(server.getsockname()) as late:
                wait_for_limit(late, 12_000)
                accepted, _ = server.accept()
                with accepted:
                    early.sendall(b"text")
                    assert accepted.recv(4) == b"text"
        is_over.set()
        one.sendall(b"text")
        assert other.recv(4) == b"text"
