"""Each process knows its place in the grid of stages, copies, shards and parts."""

from typing import Any

import torch
import torch.distributed

from tests.ranks import on_ranks
from trainwright.parallel import dist
from trainwright.parallel.layout import Layout
from trainwright.parallel.mesh import current_mesh, use_layout


def _places() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for layout in (
        Layout(data=4, replicate=2, zero_stage=3),
        Layout(data=2, replicate=2, tensor=2),
        Layout(pipeline=4),
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
    hybrid, tensor, stages = zip(*(found.values() for found in ranks), strict=True)
    assert [place["data"] for place in hybrid] == [(rank, 4) for rank in range(4)]
    assert [place["data ranks"] for place in hybrid] == [[0, 1, 2, 3]] * 4
    assert [place["their sum"] for place in hybrid] == [6.0] * 4
    assert [place["data"] for place in tensor] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert [place["tensor"] for place in tensor] == [(0, 2), (1, 2), (0, 2), (1, 2)]
    assert [place["data ranks"] for place in tensor] == [[0, 2], [1, 3]] * 2
    assert [place["pipeline"] for place in stages] == [(rank, 4) for rank in range(4)]
    assert [place["data"] for place in stages] == [(0, 1)] * 4
