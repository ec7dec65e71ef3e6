"""One process of many without the others: tensors without data, and a process group that exchanges nothing.

``FakeTensorMode`` and the fake process group are private parts of torch. Everything else is torch's public API, apart
from the replacements that :func:`simulated_process` makes while it is active, where torch needs the data of tensors.
"""

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from trainwright._torch_compat.probing import fault_of, real_tensors
from trainwright.base import dist as ranks
from trainwright.base.errors import ConfigError


@contextmanager
def simulated_process(rank: int, world_size: int) -> Iterator[None]:
    """A context in which new tensors have a shape but no data, and this is process ``rank`` of ``world_size``.

    Raises:
        ConfigError: there is a process group already, or this torch lacks a private part that the simulation needs.
    """
    dist = torch.distributed
    if dist.is_initialized():
        raise ConfigError("estimate: this process has joined a process group; run it without a launcher.")
    fault = fault_of(_probe)
    if fault is not None:
        raise ConfigError(f"estimate: torch {torch.__version__} cannot simulate a process ({fault}).")
    from torch._subclasses import fake_tensor
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    with ExitStack() as stack:
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
        stack.callback(dist.destroy_process_group)
        stack.callback(_forget_meshes)
        for replacement in _replacements():
            stack.enter_context(replacement)
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        try:
            yield
        except (fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException) as error:
            raise ConfigError(
                f"estimate: {_place(error)} uses the value of a tensor, but tensors have no values here."
            ) from error


def _forget_meshes() -> None:
    """Clear what DTensor has cached: an equal mesh of another process, or a real one, has groups of other names."""
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import _redistribute, debug

    with suppress(AttributeError):  # absent in some releases
        debug._clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
    with suppress(AttributeError):
        _redistribute._gen_transform_infos.cache_clear()


def _place(error: Exception) -> str:
    """The latest line of a traceback outside of torch."""
    frames = traceback.extract_tb(error.__traceback__)
    outside = (f for f in reversed(frames) if "/torch/" not in f.filename and f.name != "__torch_dispatch__")
    own = next(outside, frames[-1])
    return f"{own.filename}:{own.lineno}"


def _probe() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    FakeStore()
    with FakeTensorMode(allow_non_fake_inputs=True):
        weight = torch.zeros(2, 3, requires_grad=True)
        torch.autograd.backward((weight @ torch.ones(3)).sum())
        assert getattr(weight.grad, "shape", None) == (2, 3), "a gradient has no shape"


def _replacements() -> list[AbstractContextManager[Any]]:
    from torch.distributed import device_mesh

    dist, mesh = torch.distributed, device_mesh.DeviceMesh
    return [
        replaced(nn.Module, "_apply", _converted()),
        replaced(Tensor, "__deepcopy__", _copied),  # torch's own copies the data
        *([] if _grouped is None else [replaced(nn.functional, "grouped_mm", _grouped_mm)]),
        # Objects travel as the data of tensors. All processes have the same in a simulation.
        replaced(dist, "all_gather_object", _gather_objects),
        replaced(ranks, "all_gather_content", lambda content, group=None: [content] * dist.get_world_size(group)),
        replaced(dist, "broadcast_object_list", _nothing),
        replaced(ranks, "largest", lambda *numbers, group=None: [*numbers]),
        replaced(dist, "barrier", _nothing),
        *(replaced(mesh, name, _with_data(getattr(mesh, name))) for name in _OF_RANKS),
        *_of_sharding(),
    ]


_grouped = getattr(nn.functional, "grouped_mm", None)  # of torch


def _grouped_mm(rows: Tensor, weight: Tensor, **options: Any) -> Any:
    """The product of rows with the matrices of their experts, as used by models of transformers.

    Without data torch computes only those of bfloat16. The product with one matrix has the same shapes and operations.
    """
    if rows.dim() == 2 and weight.dim() == 3 and rows.dtype != torch.bfloat16:
        return rows @ weight[0]
    assert _grouped is not None  # it is replaced only where torch has it
    return _grouped(rows, weight, **options)


def _of_sharding() -> list[AbstractContextManager[Any]]:
    """In releases without these parts an estimate takes longer."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    chunks, shapes = "_chunk_with_empty", "_propagate_tensor_meta_non_cached"
    found: list[AbstractContextManager[Any]] = []
    if hasattr(_fsdp_param, chunks):  # of each parameter for all processes, of which FSDP2 uses two
        found.append(replaced(_fsdp_param, chunks, _Chunks))
    if hasattr(ShardingPropagator, shapes):  # DTensor runs an operation on complete tensors, to learn their shapes
        known = _with_data(getattr(ShardingPropagator, shapes))
        found.append(replaced(ShardingPropagator, shapes, known))
    return found


class _Chunks:
    """``torch.chunk`` with empty chunks for the last processes, each of which is cut when it is used."""

    def __init__(self, tensor: Tensor, num_chunks: int, dim: int) -> None:
        self._tensor, self._dim, self._size = tensor, dim, -(-tensor.size(dim) // num_chunks)

    def __getitem__(self, index: int) -> Tensor:
        first, size = index * self._size, self._tensor.size(self._dim)
        if first >= size:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, first, min(self._size, size - first))


# Methods of DeviceMesh that compute with a tensor of ranks.
_OF_RANKS = ("__init__", "_flatten", "_unflatten")


class SimulatedReplica(DistributedDataParallel):
    """DistributedDataParallel without its reducer, which is C++ code that needs data: the same tensors and traffic."""

    def __init__(self, module: nn.Module, *_: Any, gradient_as_bucket_view: bool = False, **options: Any) -> None:
        nn.Module.__init__(self)
        self.module = module
        self.require_backward_grad_sync = True
        self.find_unused_parameters = bool(options.get("find_unused_parameters"))
        self._is_view = gradient_as_bucket_view
        for parameter in module.parameters():
            if parameter.requires_grad:  # part of a bucket of gradients
                hook = self._averaged(torch.empty_like(parameter, requires_grad=False))
                parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def forward(self, *inputs: Any, **named: Any) -> Any:
        if torch.is_grad_enabled() and self.require_backward_grad_sync:
            for buffer in self.module.buffers():
                torch.distributed.broadcast(buffer, 0)
        return self.module(*inputs, **named)

    def _averaged(self, in_bucket: Tensor) -> Callable[[Tensor], None]:
        def average(parameter: Tensor) -> None:
            if self.require_backward_grad_sync:
                torch.distributed.all_reduce(in_bucket)
            if self._is_view:
                parameter.grad = in_bucket

        return average


def _copied(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    if id(tensor) not in memo:
        same = tensor.detach().clone()
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(same, tensor.requires_grad) if is_parameter else same
    copied: Tensor = memo[id(tensor)]
    return copied


def _with_data(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        with real_tensors():
            return function(*args, **options)

    return call


def static_pipeline() -> AbstractContextManager[Any]:
    """A context in which stages of torch's pipelines do not ask each other whether all know the shapes: all do."""
    from torch.distributed.pipelining import schedules

    name = "_warmup_p2p"  # since torch 2.12
    kind: Any = schedules._PipelineSchedule
    if not hasattr(kind, name):
        return nullcontext()

    def know(schedule: Any, stages: list[Any], *_: Any) -> None:
        for stage in stages:
            stage._inference_mode = schedules.InferenceMode.STATIC  # type: ignore[attr-defined]

    return replaced(kind, name, know)


@contextmanager
def replaced(part: Any, name: str, value: Any) -> Iterator[None]:
    """A context in which an attribute of a part of torch is another one."""
    before = getattr(part, name)
    setattr(part, name, value)
    try:
        yield
    finally:
        setattr(part, name, before)


def _nothing(*_: Any, **__: Any) -> None: ...


def _gather_objects(objects: list[Any], value: Any, group: Any = None) -> None:
    objects[:] = [value] * len(objects)


def _converted() -> Callable[..., nn.Module]:
    """``nn.Module._apply`` for parameters without data: torch's own exchanges the contents of two tensors."""
    results = WeakIdKeyDictionary()  # a shared parameter is converted once

    def apply(module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        for child in module.children() if recurse else ():
            child._apply(function)  # type: ignore[no-untyped-call]
        named: list[dict[str, Any]] = [module._parameters, module._buffers]
        for tensors in named:
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                result = results.get(tensor)  # type: ignore[no-untyped-call]
                if result is None:
                    with torch.no_grad():
                        result = function(tensor)
                    if result is tensor:
                        continue
                    if isinstance(tensor, nn.Parameter):
                        result = nn.Parameter(result, tensor.requires_grad)
                    results[tensor] = result
                tensors[name] = result
        return module

    return apply
