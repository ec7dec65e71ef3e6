"""The place of a DTensor's local values in the complete tensor.

torch computes it for its own distributed checkpoints, also where two dimensions of a mesh shard the same dimension of
a tensor, in ``DTensor.__create_chunk_list__``. There is no public function for it.
"""

import sys
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter


def is_dtensor(value: object) -> bool:
    """Whether ``value`` is torch's DTensor. Does not import it."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local_of(tensor: Tensor) -> Tensor:
    """The values of a tensor in this process: those of a DTensor's own part."""
    local: Tensor = tensor.to_local() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]
    return local


def checksum(tensor: Tensor) -> int:
    """A number that changes if a value does; 0 of placeholders and tensors of other classes. Waits for the device."""
    values = local_of(tensor)
    if type(values) not in (Tensor, Parameter) or values.is_meta or values.itemsize > 8:
        return 0
    bits = getattr(torch, f"int{8 * values.itemsize}")
    return int(values.detach().view(bits).sum(dtype=bits))


def chunk_of(tensor: Any) -> tuple[tuple[int, ...], Tensor]:
    """The offset and the values of this process's part of a DTensor.

    Raises:
        RuntimeError: this release of torch describes parts in another way.
    """
    local: Tensor = tensor.to_local().detach()
    chunks = tensor.__create_chunk_list__()
    if len(chunks) != 1 or tuple(chunks[0].sizes) != tuple(local.shape):
        raise RuntimeError(
            f"torch {torch.__version__}: a part of shape {tuple(local.shape)} of a DTensor with {tensor.placements} is"
            f" described as {chunks}; checkpoints need one block per process."
        )
    return tuple(chunks[0].offsets), local


def with_chunk(like: Any, local: Tensor) -> Tensor:
    """A DTensor with the layout of ``like`` and other local values."""
    tensor: Tensor = type(like).from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return tensor
