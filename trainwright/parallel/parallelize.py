"""Put a model on the processes of a run, once, before its optimizer is built. Both APIs call it here."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from trainwright.base.dist import get_world_size
from trainwright.base.errors import ConfigError
from trainwright.parallel.adapters import check_adapters
from trainwright.parallel.context import split_attention
from trainwright.parallel.mesh import Mesh, current_mesh
from trainwright.parallel.meta_start import allocate, has_meta, initialize, is_meta, shell_of, states_of_generators
from trainwright.parallel.pipeline import Pipeline, pipeline_of
from trainwright.parallel.precision import run_under
from trainwright.parallel.rank_checks import check_same_model
from trainwright.parallel.recompute import compile_blocks, recompute_blocks
from trainwright.parallel.sharding import check_dense, check_shardable, shard_data
from trainwright.parallel.simulated import simulation
from trainwright.parallel.tensor_plan import check_plan, expert_modules, tensor_plan


class Placed(NamedTuple):
    """What :func:`parallelize` has done.

    Attributes:
        recomputed: the names of the recomputed blocks.
        fill: gives initial values to what was on the meta device and nothing has loaded since; None: nothing was.
            Every process must call it.
    """

    recomputed: list[str]
    fill: Callable[[], None] | None


def parallelize(
    model: nn.Module,
    device: torch.device,
    *,
    recompute: bool | Literal["selective", "offload"] = False,
    autocast: Callable[[], torch.autocast] | None = None,
    splits_scores: bool = True,
    find_unused_parameters: bool = False,
    compiles_blocks: bool = False,
    gathered_as: Literal["bf16"] | None = None,
) -> Placed:
    """Move ``model`` to the device, in place, with its parts spread over the processes as the current layout says.

    Every process calls this with the same model; its weights become those of the first process. Without a mesh (one
    process, or plain data parallelism) each keeps the whole model. The device gets one block after another, of which
    each process keeps its part. What is on the meta device is divided there, and filled afterwards.

    Args:
        recompute: compute the repeated blocks again in the backward pass; "selective": but for matrix products;
            "offload": from inputs in host memory.
        autocast: the context of every call of the model; None: none, and an earlier one is removed.
        splits_scores: with tensor parallel, a model may leave the scores of classes apart in training, because nothing
            but its own cross-entropy uses them.
        find_unused_parameters: processes may use different parameters in an update.
        compiles_blocks: compile the repeated blocks, each when it is first called.
        gathered_as: the type in which ZeRO gathers parameters; None: their own.

    Raises:
        ConfigError: a process has another model, or it cannot be spread as the layout requires. Raised on all of them.
    """
    _check_whole(model)
    check_same_model(model)
    mesh = current_mesh()
    complete = shell_of(model) if has_meta(model) else None
    words = {} if mesh is None else _words_of_checked(model, mesh, is_one_unit=find_unused_parameters)
    experts = _checked_experts(
        model, mesh, compiles_blocks=compiles_blocks, find_unused_parameters=find_unused_parameters
    )
    if mesh is None and complete is None:
        model.to(device)
    if simulation() is None and get_world_size() > 1:  # equal weights, even if they are drawn from own generators
        share_tensors([*model.buffers(), *model.parameters()], device)
    pipeline = None if mesh is None else _cut(model, mesh, device)
    if mesh is not None:  # first: what a backward pass repeats uses parameters as the forward pass does
        if mesh.layout.context > 1:
            split_attention(model, mesh, compiles_blocks=compiles_blocks)
        _divide_layers(model, mesh, words, experts, splits_scores=splits_scores)
    recomputed = recompute_blocks(model, recompute) if recompute else []
    if compiles_blocks:
        compile_blocks(model, device)
    if mesh is None:
        run_under(model, autocast)
    else:
        stages = [model] if pipeline is None else pipeline.stages
        _divide(
            stages, mesh, autocast, experts=[model.get_submodule(name) for name in experts],
            is_one_unit=find_unused_parameters, gathered_as=gathered_as,
        )  # fmt: skip
    parts = [model] if pipeline is None else [model, *(stage.model for stage in pipeline.stages)]
    home = _home(mesh, device)
    fill = None
    if complete is not None:
        allocate(parts, device, home)
        fill = partial(initialize, complete, parts, device, states_of_generators(device))
    _move(parts, device, home)
    if pipeline is not None:
        pipeline.complete()
    return Placed(recomputed, fill)


def _check_whole(model: nn.Module) -> None:
    if pipeline_of(model) is not None or any(hasattr(parameter, "full_tensor") for parameter in model.parameters()):
        raise ConfigError(
            "The model is divided between the processes already, by an earlier trainer. Build it"
            " again, or continue with that trainer."
        )


def _divide_layers(
    model: nn.Module, mesh: Mesh, words: dict[str, str], experts: list[str], *, splits_scores: bool
) -> None:
    """Keep this process's part of the layers that ``words`` name, and of the experts."""
    if experts:
        from trainwright.parallel.experts import shard_experts

        expert_mesh: Any = mesh.expert_mesh  # the layout divides experts
        same_tokens = mesh.device_mesh["tp"] if mesh.layout.tensor > 1 else None
        shard_experts(model, expert_mesh["ep"], experts, same_tokens)
    if words:
        from trainwright.parallel.tensor import shard_tensors

        words = {name: word for name, word in words.items() if name not in experts}
        tensor_mesh, is_sequence_parallel = mesh.device_mesh["tp"], mesh.layout.sequence_parallel
        shard_tensors(model, tensor_mesh, words, sequence_parallel=is_sequence_parallel, splits_scores=splits_scores)


def _home(mesh: Mesh | None, device: torch.device) -> torch.device:
    """Where parameters are between two steps."""
    return torch.device("cpu") if mesh is not None and mesh.layout.offload else device


def _cut(model: nn.Module, mesh: Mesh, device: torch.device) -> Pipeline | None:
    if mesh.layout.pipeline == 1:
        return None
    active = simulation()
    return (Pipeline if active is None else active.pipeline)(model, mesh, device)


def _divide(
    stages: Iterable[nn.Module], mesh: Mesh, autocast: Callable[[], torch.autocast] | None, **sharding: Any
) -> None:
    """Keep this process's part of each parameter; torch moves the blocks to the device, one after another."""
    if autocast is not None and mesh.layout.zero_stage == 3:
        # Its cache would keep a copy of every gathered parameter until the end of the forward pass.
        autocast = partial(autocast, cache_enabled=False)  # type: ignore[call-arg]  # a partial of torch.autocast
    for stage in stages:
        run_under(stage, autocast)
        shard_data(stage, mesh, **sharding)


def _words_of_checked(model: nn.Module, mesh: Mesh, *, is_one_unit: bool) -> dict[str, str]:
    """The word of each module that tensor-parallel processes divide. Checks that the layout can divide the model."""
    layout = mesh.layout
    words = {}
    for setting, size in (("tensor", layout.tensor), ("pipeline", layout.pipeline), ("context", layout.context)):
        if size > 1:
            check_adapters(model, f"{setting} parallel")
    if layout.tensor > 1:
        words = check_plan(model, tensor_plan(model), layout.tensor, sequence_parallel=layout.sequence_parallel)
        if layout.pipeline > 1 and "sequence_input" in words.values():
            raise ConfigError(
                f"sequence_parallel: the stages of {type(model).__name__} take complete texts. Set it to False, or"
                " pipeline_parallel_size to 1."
            )
    for parameter in model.parameters():  # a DTensor's state would have other strides
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()
    if layout.is_sharded or words:
        check_dense(model)
    if layout.is_sharded:
        check_shardable(model, is_one_unit=is_one_unit)
    return words


def _checked_experts(
    model: nn.Module, mesh: Mesh | None, *, compiles_blocks: bool, find_unused_parameters: bool
) -> list[str]:
    """The names of the modules whose experts the processes divide.

    Raises:
        ConfigError: the layout divides experts, and there are none, or the other settings do not allow it.
    """
    size = 1 if mesh is None else mesh.layout.expert
    if size == 1:
        return []
    check_adapters(model, "expert parallel")
    for name, is_on in (("compile_blocks", compiles_blocks), ("find_unused_parameters", find_unused_parameters)):
        if is_on:
            raise ConfigError(
                f"expert_parallel_size: got {size} with {name}=True, which is not supported: processes exchange"
                " different numbers of tokens. Set one of them off."
            )
    return expert_modules(model, size)


def _move(parts: Iterable[nn.Module], device: torch.device, home: torch.device) -> None:
    """Move to the device what is not there yet. Buffers that several parts hold stay shared."""
    moved: dict[int, tuple[Tensor, Tensor]] = {}
    for part in parts:
        for module in part.modules():
            for name, buffer in [*module.named_buffers(recurse=False)]:
                if id(buffer) not in moved:
                    moved[id(buffer)] = buffer, buffer.to(device)
                setattr(module, name, moved[id(buffer)][1])
        if home == device:
            part.to(device)


def share_tensors(tensors: Iterable[Tensor], device: torch.device | None = None) -> None:
    """Broadcast the values of the first process, on ``device`` one after another; None: where they are."""
    dist: Any = torch.distributed
    for tensor in (tensor for tensor in tensors if not is_meta(tensor)):
        sent = tensor.detach() if device is None else tensor.detach().to(device)
        dist.broadcast(sent, 0)
        if sent.device != tensor.device:
            tensor.detach().copy_(sent)


def use_replaced_parameters(optimizer: Any, before: Iterable[tuple[str, Tensor]], model: nn.Module) -> None:
    """Let an optimizer that was built before :func:`parallelize` update the parameters that replace its own.

    Its state is spread as they are. Parameters that other processes hold now are removed from it.

    Args:
        before: the named parameters of the model at that time, with duplicates.
    """
    after = dict(model.named_parameters(remove_duplicate=False))
    names: dict[int, list[str]] = {}
    for name, parameter in before:  # a tied weight has several, and a pipeline stage may have any of them
        names.setdefault(id(parameter), []).append(name)
    for group in optimizer.param_groups:
        params = group["params"]
        group["params"] = []
        for old in params:
            new = next((after[name] for name in names[id(old)] if name in after), None) if id(old) in names else old
            state = {} if new is old else optimizer.state.pop(old, {})
            if new is not None:
                group["params"].append(new)
            if new is not None and state:
                optimizer.state[new] = {name: _spread_as(new, value) for name, value in state.items()}


def _spread_as(parameter: Any, value: Any) -> Any:
    """A value of an optimizer's state, with its elements on the processes that hold those of ``parameter``."""
    if not isinstance(value, Tensor) or value.shape != parameter.shape or not hasattr(parameter, "placements"):
        return value
    from torch.distributed.tensor import distribute_tensor

    if type(value) is type(parameter):
        return value
    spread = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
    return spread.to(parameter.device)
