"""Put a model on the processes of a run, once, before its optimizer is built. Both APIs call it here."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from trainwright.parallel.dist import get_world_size
from trainwright.parallel.mesh import Mesh, current_mesh
from trainwright.parallel.pipeline import Pipeline
from trainwright.parallel.plan import check_plan, tensor_plan
from trainwright.parallel.precision import run_under
from trainwright.parallel.recompute import recompute_blocks
from trainwright.parallel.sharding import shard_data


def parallelize(
    model: nn.Module,
    device: torch.device,
    *,
    recompute: bool = False,
    autocast: Callable[[], torch.autocast] | None = None,
    splits_scores: bool = True,
) -> list[str]:
    """Move ``model`` to the device, in place, with its parts spread over the processes as the current layout says.

    Every process calls this with the same model; its weights become those of the first process. Without a mesh (one
    process, or plain data parallelism) each keeps the whole model.

    Args:
        recompute: compute the repeated blocks again in the backward pass.
        autocast: the context of every call of the model; None: none, and an earlier one is removed.
        splits_scores: with tensor parallel, a model may leave the scores of classes apart in training, because nothing
            but its own cross-entropy uses them.

    Returns the names of the recomputed blocks.

    Raises:
        ConfigError: the model cannot be spread as the layout requires. Raised before any process waits for another.
    """
    mesh = current_mesh()
    words = {} if mesh is None else _tensor_words(model, mesh)
    model.to(device)
    share_state(model)  # equal weights, even if a model draws from generators of its own
    pipeline = None if mesh is None or mesh.layout.pipeline == 1 else Pipeline(model, mesh, device)
    recomputed = recompute_blocks(model) if recompute else []
    if mesh is not None and words:
        from trainwright.parallel.tensor import shard_tensors

        is_sequence_parallel = mesh.layout.sequence_parallel
        tensor_mesh = mesh.device_mesh["tp"]
        shard_tensors(model, tensor_mesh, words, sequence_parallel=is_sequence_parallel, splits_scores=splits_scores)
    for part in [model] if pipeline is None else pipeline.stages:
        run_under(part, autocast)
        if mesh is not None:
            shard_data(part, mesh)
    if pipeline is not None:
        pipeline.mark_tied_copies()
    return recomputed


def share_state(model: nn.Module) -> None:
    """Broadcast the parameters and buffers of the first process."""
    if get_world_size() > 1:
        share_tensors([*model.buffers(), *model.parameters()])


def share_tensors(tensors: Iterable[Tensor]) -> None:
    """Broadcast the values of the first process."""
    dist: Any = torch.distributed
    for tensor in tensors:
        dist.broadcast(tensor.detach(), 0)


def _tensor_words(model: nn.Module, mesh: Mesh) -> dict[str, str]:
    """The word of each module that tensor-parallel processes divide, checked."""
    layout = mesh.layout
    if layout.tensor == 1:
        return {}
    return check_plan(model, tensor_plan(model), layout.tensor, sequence_parallel=layout.sequence_parallel)
