"""ZeRO by torch's FSDP2: the data ranks of a copy share its parameters, gradients and optimizer state.

Each repeated block of a model is a unit, a large embedding and head are one each, and the rest of the model is another
one. The parameters of a unit are gathered together, before its forward pass, and its gradients are averaged together,
in its backward pass. Outside of these each rank holds its share of every parameter, as a ``DTensor``.
"""

import linecache
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from trainwright._torch_compat.norm_layers import BATCH_NORMS
from trainwright.base.dist import broadcast_over_data
from trainwright.base.errors import ConfigError
from trainwright.parallel.faults import meet
from trainwright.parallel.mesh import Mesh, current_mesh
from trainwright.parallel.pipeline import pipeline_of
from trainwright.parallel.recompute import repeated_blocks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule

_FULL_UNIT = 1_000_000  # parameters that are worth an exchange of their own


def shard_data(
    model: nn.Module,
    mesh: Mesh,
    *,
    experts: Iterable[nn.Module] = (),
    is_one_unit: bool = False,
    gathered_as: Literal["bf16"] | None = None,
) -> None:
    """Share ``model`` between the data ranks, in place; its parameters are replaced.

    Stage 3 gathers parameters for the forward pass and again for the backward pass; stages 1 and 2 keep them from the
    first forward to the last backward pass of an update. Without ZeRO each rank keeps all of the model.

    Args:
        experts: modules of which each rank has some experts; those with the same ones share them.
        is_one_unit: gather all parameters together, and average also those without gradients: ranks may call different
            blocks for the same batch.
        gathered_as: the type in which parameters are gathered, so that blocks compute in it; gradients are summed in
            float32. None: their own.

    Raises:
        ConfigError: a parameter is a single number, which cannot be shared.
    """
    layout = mesh.layout
    if not layout.is_sharded:
        return
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    is_resharded = layout.zero_stage == 3
    settings: dict[str, Any] = {"mesh": _sharing(mesh.device_mesh)}
    if layout.offload:
        settings["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_mesh.device_type != "cpu")
    if gathered_as is not None:
        settings["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if mesh.expert_mesh is not None:
        of_experts = {**settings, "mesh": _sharing(mesh.expert_mesh)}
        if gathered_as is not None:  # the type of their inputs is that of the block; routers weigh in another one
            of_experts["mp_policy"] = replace(settings["mp_policy"], cast_forward_inputs=False)
        for module in experts:
            fully_shard(module, **of_experts, reshard_after_forward=is_resharded)
    units = [] if is_one_unit else sharded_units(model)
    head = _head(model)
    for unit in units:
        fully_shard(unit, **settings, reshard_after_forward=is_resharded and unit is not head)
    # Units are not gathered ahead of their calls: blocks may be called for some batches only, which would then differ
    # between the ranks. torch issues the exchange of a unit while the one before computes.
    for root in _roots(model):
        # The last unit of a forward pass is the first of the backward pass: torch keeps it gathered between them.
        shared = fully_shard(root, **settings, reshard_after_forward=None if is_resharded else False)
        if is_one_unit:
            shared.set_reduce_scatter_unused_params(True)


def _sharing(mesh: "DeviceMesh") -> "DeviceMesh":
    """The dimensions of the ranks that average the gradients of the same parameters."""
    return mesh["shard"] if mesh["replicate"].size() == 1 else mesh["replicate", "shard"]


def check_dense(model: nn.Module) -> None:
    """Raise if a module has sparse gradients, which torch's layouts cannot divide."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ConfigError(
                f"{name or type(model).__name__} ({type(module).__name__}) has sparse=True; ZeRO and tensor parallelism"
                " need dense gradients. Build it with sparse=False."
            )


def check_shardable(model: nn.Module, *, is_one_unit: bool = False) -> None:
    """Raise if :func:`shard_data` cannot share ``model``."""
    if is_one_unit:
        _check_unused_parameters()
    _roots(model)
    _check_types(model, () if is_one_unit else sharded_units(model))
    scalars = [name for name, parameter in model.named_parameters() if parameter.dim() == 0]
    if scalars:
        raise ConfigError(
            f"ZeRO: {', '.join(scalars[:3])}{' …' if len(scalars) > 3 else ''} of {type(model).__name__} has no"
            " dimension to divide. Make it a tensor of shape (1,)."
        )


def _check_unused_parameters() -> None:
    """Raise if torch cannot average the gradients of parameters that only some ranks use: it would wait forever."""
    from torch.distributed.fsdp import FSDPModule

    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        raise ConfigError(
            "find_unused_parameters=True with ZeRO, tensor or pipeline parallelism needs torch 2.13 or newer; this is"
            f" torch {torch.__version__}. Install a newer torch, use data parallelism alone, or set it to False."
        )


def _check_types(model: nn.Module, units: Iterable[nn.Module]) -> None:
    """Raise if trained parameters that are gathered together have different types."""
    unit_of = {id(parameter): place for place, unit in enumerate(units) for parameter in unit.parameters()}
    firsts: dict[int | None, tuple[str, torch.dtype]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            first, dtype = firsts.setdefault(unit_of.get(id(parameter)), (name, parameter.dtype))
            if dtype != parameter.dtype:
                raise ConfigError(
                    f"ZeRO: {first} ({_plain(dtype)}) and {name} ({_plain(parameter.dtype)}) of {type(model).__name__}"
                    " are divided together, and so need one type. Give them the same type, or freeze one of them."
                )


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def sharded_units(model: nn.Module) -> list[nn.Module]:
    """The modules whose parameters are gathered on their own, in the order of their calls: repeated blocks, and before
    and after them the embedding and the head that the model names (`get_input_embeddings`, `get_output_embeddings`).

    The parameters of small modules and of those that share a parameter with others are gathered with the rest of the
    model. Another module is none: the model may use its parameters without a call of it.
    """
    uses = _uses(model)
    size = sum(parameter.numel() for parameter in model.parameters())
    blocks = dict.fromkeys(_callable_blocks(model))
    inner = {id(module) for block in blocks for module in block.modules()}
    ends = [one if one is None or id(one) not in inner else None for one in (_named_part(model, "input"), _head(model))]
    return [
        unit
        for unit in (ends[0], *blocks, ends[1])
        if unit is not None
        and sum(parameter.numel() for parameter in unit.parameters()) >= min(size / 100, _FULL_UNIT)
        and all(uses[key] == count for key, count in _uses(unit).items())
    ]


def _head(model: nn.Module) -> nn.Module | None:
    """The last unit of a forward pass is the first of the backward pass, so that it stays gathered between them."""
    return _named_part(model, "output")


def _named_part(model: nn.Module, kind: Literal["input", "output"]) -> nn.Module | None:
    """The embedding or the head of a model of transformers, or of one with such a method; None: it names none.

    A forward that another package, such as one of fused losses, has put in the place of the model's may use the weight
    of the head without a call of it: then there is none, either.
    """
    method = getattr(model, f"get_{kind}_embeddings", None)
    owner = getattr(method, "__self__", None)  # the model in an adapter
    if method is None or owner is None or _package(method) != _package(owner.forward):
        return None
    try:
        part = method()
    except (NotImplementedError, AttributeError):  # of a model without
        return None
    return part if isinstance(part, nn.Module) and _has_forward(part) else None


def _package(method: Any) -> str:
    return str(method.__module__).partition(".")[0]


def _callable_blocks(model: nn.Module) -> Iterator[nn.Module]:
    for block in repeated_blocks(model):
        if _has_forward(block):
            yield block
        else:
            yield from _callable_blocks(block)


def _roots(model: nn.Module) -> list[nn.Module]:
    """The model; of a mere collection of models, such as those of a GAN, each of them."""
    if _has_forward(model):
        return [model]
    if next(model.parameters(recurse=False), None) is not None:
        raise ConfigError(
            f"ZeRO: {type(model).__name__} has parameters of its own but no forward, before which they are gathered."
            " Write a forward, or move the parameters into a module that has one."
        )
    children = [child for child in model.children() if next(child.parameters(), None) is not None]
    return [root for child in children for root in _roots(child)]


def _has_forward(module: nn.Module) -> bool:
    return getattr(type(module), "forward", None) is not nn.Module.forward


def _uses(module: nn.Module) -> Counter[int]:
    return Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))


def fsdp_modules(model: nn.Module) -> "list[FSDPModule]":
    """The units of :func:`shard_data` in a model."""
    if current_mesh() is None:
        return []
    from torch.distributed.fsdp import FSDPModule

    return [module for part in _parts(model) for module in part.modules() if isinstance(module, FSDPModule)]


def class_before_sharding(module: nn.Module) -> type[nn.Module]:
    """The class of a module; of a unit of :func:`shard_data`, which has another one, the class that it had before."""
    if current_mesh() is None:
        return type(module)
    from torch.distributed.fsdp import FSDPModule

    kinds: tuple[type[Any], ...] = type(module).__mro__
    return next(kind for kind in kinds if not issubclass(kind, FSDPModule))


def _parts(model: nn.Module) -> Sequence[nn.Module]:
    """What :func:`shard_data` has shared: the model, or the pipeline stages that contain it."""
    pipeline = pipeline_of(model)
    return [model] if pipeline is None else pipeline.stages


def computes_together(model: nn.Module) -> bool:
    """Whether the ranks exchange data in each forward pass of ``model``, so that all must call it equally often."""
    mesh = current_mesh()
    if mesh is None or mesh.layout.shard == mesh.layout.tensor == mesh.layout.expert == 1:
        return False
    return any(is_sharded(parameter) for parameter in model.parameters())


def reshard(model: nn.Module) -> None:
    """Free parameters that a forward pass without a backward pass has left gathered."""
    for module in fsdp_modules(model):
        module.reshard()


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Each data rank has all parameters of ``model`` and may call it by itself. Every rank must enter and leave."""
    modules = fsdp_modules(model)
    # Which stay gathered after a forward pass.
    kept = {id(one) for part in _parts(model) for one in (*_roots(part), _head(part))}
    units = [module for module in modules if id(module) not in kept]
    mesh = current_mesh()
    is_resharded = mesh is not None and mesh.layout.zero_stage == 3
    for module in modules:
        module.unshard()
    for unit in units if is_resharded else ():
        unit.set_reshard_after_forward(False, recurse=False)
    try:
        with _complete_experts(model, mesh):
            yield
    finally:
        for unit in units if is_resharded else ():
            unit.set_reshard_after_forward(True, recurse=False)
        reshard(model)


def _complete_experts(model: nn.Module, mesh: Mesh | None) -> AbstractContextManager[None]:
    if mesh is None or mesh.expert_mesh is None:
        return nullcontext()
    from trainwright.parallel.experts import complete_experts

    return complete_experts(model)


class ShardedGradients:
    """Averages the gradients of a model that :func:`shard_data` has prepared, over its data ranks.

    Has the methods of :class:`~trainwright.engine.gradient_sync.Replica`. The gradients are averaged during the last
    backward pass of an update, at ZeRO stage 3 during each one: only the rank's share of them stays in memory.

    Args:
        is_each_averaged: average in each backward pass, as a step with several of them needs.
        check_used: called before the gradients of a batch are averaged, if those of each batch are.
        before_use: called when the gradients of an update are averaged.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        *,
        is_each_averaged: bool = False,
        check_used: Callable[[], object] = bool,
        before_use: Callable[[], object] = bool,
    ) -> None:
        self._modules = fsdp_modules(model)
        self._parameters = [*model.parameters()]
        self._trainable: list[bool] | None = None
        self._buffers = _changing_buffers(model)
        self._is_each_averaged = is_each_averaged or mesh.layout.zero_stage == 3
        self._averages = True  # in the backward pass of the current batch
        self._check_used, self._before_use = check_used, before_use

    def before_batch(self, *, is_last: bool) -> None:
        """Call this before each forward pass; ``is_last``: it is the last one of the update."""
        trainable = [parameter.requires_grad for parameter in self._parameters]
        if trainable != self._trainable:
            if self._trainable is not None:
                meet("the first step after parameters were frozen or unfrozen")
            self._trainable = trainable
        if self._is_each_averaged:
            self._check_used()
        if self._averages:  # the first batch of an update, whose weights another forward pass may have kept
            for module in self._modules:
                module.reshard()
            for buffer in self._buffers:
                broadcast_over_data(buffer)
        if is_last is not self._averages and not self._is_each_averaged:
            self._average(is_last)

    def finish(self) -> None:
        """Call this when all gradients of an update are computed, before they are used."""
        self._before_use()

    def average_after_backward(self) -> None:
        """Average in each backward pass from now on: there may be several for a batch."""
        self._is_each_averaged = True
        self._average(True)

    def _average(self, is_last: bool) -> None:
        self._averages = is_last
        for module in self._modules:
            module.set_requires_gradient_sync(is_last, recurse=False)
            module.set_reshard_after_backward(is_last, recurse=False)
            module.set_is_last_backward(is_last)


def _changing_buffers(model: nn.Module) -> list[Tensor]:
    """Saved numbers that forward passes may change and read: each update starts with those of the first data rank.

    The statistics of batch norms are not read in training; evaluations and checkpoints use the first rank's.
    """
    saved, found = model.state_dict(keep_vars=True), []
    for name, module in model.named_modules():
        if not isinstance(module, BATCH_NORMS):
            prefix = f"{name}." if name else ""
            buffers = module.named_buffers(recurse=False)
            found += [buffer for key, buffer in buffers if buffer.is_floating_point() and prefix + key in saved]
    return found


def _place_of(error: Exception, model: nn.Module) -> str:
    """The module and the line that call torch in the traceback of an error; "The step" if there is none."""
    names = {id(module): name for name, module in model.named_modules()}
    place = "The step"
    for frame, line in traceback.walk_tb(error.__traceback__):
        if str(frame.f_globals.get("__name__")).partition(".")[0] in ("torch", "trainwright"):
            continue
        code = frame.f_code
        place = f"{code.co_filename}:{line} in {code.co_name} ({linecache.getline(code.co_filename, line).strip()})"
        module = frame.f_locals.get("self")
        if id(module) in names:
            place = f"{names[id(module)] or 'the model'} ({type(module).__name__}), {place},"
    return place


def explain_parts(error: Exception, model: nn.Module) -> None:
    """Raise an error that says what a step with divided parameters cannot do, if ``error`` comes from that.

    Raises:
        ConfigError: parameters are used where they are divided, or gradients of gradients are computed.
    """
    if "mixed torch.Tensor and DTensor" in str(error):
        raise ConfigError(
            f"{_place_of(error, model)} uses parameters where they are divided between the processes, which gather them"
            " when the complete model is called. A part of it cannot be called by itself, nor its parameters be used"
            " elsewhere: call the model, and let its forward do that. A step that reads parameters after the forward"
            " pass, such as one with a penalty on them, works with zero_stage 1 and 2, which keep them gathered up to"
            " the backward pass; with 3, and with tensor parallelism, use the weight_decay of the optimizer. A module"
            " whose forward uses parameters that tensor parallelism divides works with ZeRO, or with the style"
            f" 'replicated' in its plan.\nThe error of torch: {error}"
        ) from error
    if "out of bounds for storage of size 0" in str(error):
        raise ConfigError(
            "ZeRO: the backward pass needs parameters that a backward pass before it has freed: gradients of gradients"
            " (create_graph=True, for a gradient penalty, for example), or a graph that is used twice. Use data"
            " parallelism without zero_stage.\n"
            f"The error of torch: {error}"
        ) from error


def is_sharded(tensor: Tensor) -> bool:
    """Whether a parameter is spread over ranks, so that its gradient is averaged in the backward pass."""
    distributed: Any = torch.distributed
    return isinstance(tensor, distributed.tensor.DTensor)
