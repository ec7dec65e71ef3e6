"""The processes of a run as torch's DeviceMesh: which stage, which copy, which shard and which part is this one."""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainwright._torch_compat.probing import real_tensors
from trainwright.base import dist
from trainwright.parallel.layout import Layout

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

DIMS = ("pp", "replicate", "shard", "tp")
EXPERT_DIMS = ("replicate", "shard", "ep")


@dataclass(frozen=True)
class Mesh:
    """The process grid of a layout that is more than plain data parallelism.

    Attributes:
        layout: its sizes.
        device_mesh: torch's mesh with the dimensions ``DIMS``; its rank order is that of the processes.
        data_group: the processes with the same stage and part of each layer, whose gradients are averaged.
        context_mesh: those of them that hold the other parts of the same sequences.
        expert_mesh: all processes with the dimensions ``EXPERT_DIMS``, if they divide experts: those of the last
            dimension have the other experts of a copy, those of the others have the same ones.
    """

    layout: Layout
    device_mesh: "DeviceMesh"
    data_group: "ProcessGroup"
    context_mesh: "DeviceMesh | None" = None
    expert_mesh: "DeviceMesh | None" = None

    @cached_property
    def pipeline_rank(self) -> int:
        """The stage of this process."""
        return int(self.device_mesh.get_local_rank("pp"))

    @cached_property
    def tensor_rank(self) -> int:
        """The part of each layer that this process holds."""
        return int(self.device_mesh.get_local_rank("tp"))

    @cached_property
    def averaging_rank(self) -> int:
        """This process's number in ``data_group``."""
        copy, shard = (int(self.device_mesh.get_local_rank(dim)) for dim in ("replicate", "shard"))
        return copy * self.layout.shard + shard

    @property
    def data_rank(self) -> int:
        """The share of a global batch that this process trains on."""
        return self.averaging_rank // self.layout.context

    @property
    def context_rank(self) -> int:
        """The part of each sequence that this process holds."""
        return self.averaging_rank % self.layout.context

    @cached_property
    def pipeline_group(self) -> "ProcessGroup":
        """The stages of one copy."""
        return self.device_mesh["pp"].get_group()


def use_layout(layout: Layout, device_type: str) -> Mesh | None:
    """Arrange the processes as ``layout`` says, from now on; None: each holds the whole model.

    Every process must call this. Its data rank and data-parallel size are those of the mesh
    (:func:`~trainwright.base.dist.get_data_parallel_rank`).
    """
    mesh = None
    if not layout.is_plain:
        from torch.distributed.device_mesh import init_device_mesh

        sizes = (layout.pipeline, layout.replicate, layout.shard, layout.tensor)
        with real_tensors():  # of the ranks, in an estimate too
            device_mesh = init_device_mesh(device_type, sizes, mesh_dim_names=DIMS)
            data_group, context_mesh = _data_group(device_mesh), _context_mesh(device_mesh, layout.context)
            expert_mesh = None
            if layout.expert > 1:
                expert_mesh = init_device_mesh(device_type, layout.expert_sizes, mesh_dim_names=EXPERT_DIMS)
            mesh = Mesh(layout, device_mesh, data_group, context_mesh, expert_mesh)
    dist.use_mesh(mesh)
    return mesh


def current_mesh() -> Mesh | None:
    """The mesh of this process; None: one process, or plain data parallelism."""
    mesh: Any = dist.mesh_in_use()
    return mesh  # type: ignore[no-any-return]


def computing_device(model: nn.Module) -> torch.device:
    """The device of a model's parameters, or the one where these are copied to if they are in host memory."""
    mesh = current_mesh()
    if mesh is None or not mesh.layout.offload or mesh.device_mesh.device_type == "cpu":
        return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    return torch.device(mesh.device_mesh.device_type, torch.accelerator.current_device_index())


def _data_group(device_mesh: "DeviceMesh") -> "ProcessGroup":
    """The group over both dimensions of the data ranks. Every process must call this."""
    one = {"replicate": "shard", "shard": "replicate"}
    for name, other in one.items():
        if device_mesh.size(DIMS.index(name)) == 1:
            return device_mesh[other].get_group()
    return _own_group(device_mesh, device_mesh.size(1) * device_mesh.size(2))


def _context_mesh(device_mesh: "DeviceMesh", size: int) -> "DeviceMesh | None":
    """The context ranks, neighbours among those whose gradients are averaged. Every process must call this."""
    if size == 1:
        return None
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh.from_group(_own_group(device_mesh, size), device_mesh.device_type)


def _own_group(device_mesh: "DeviceMesh", size: int) -> "ProcessGroup":
    """This process's group of ``size`` neighbours along both dimensions of the data ranks."""
    from torch.distributed import new_subgroups_by_enumeration

    groups: Any = new_subgroups_by_enumeration
    own: ProcessGroup = groups(device_mesh.mesh.permute(0, 3, 1, 2).reshape(-1, size).tolist())[0]
    return own
