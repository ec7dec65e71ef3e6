"""The local values of DTensors that every process holds; their gradients are DTensors again.

``DTensor.to_local`` does the same with a node of the graph for each parameter, and takes 80 us for a parameter in each
forward and backward pass: it copies and checks the layout of each gradient, which here is that of the parameter. This
takes 35 us, with one node for all parameters of a module.

Gradients are copied: autograd passes one tensor to both terms of ``a + b``. It would copy that for a parameter which
keeps it, but sees only the DTensors around it, and both parameters would add later gradients to the same memory.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from trainwright._torch_compat.probing import is_usable

LocalValues = Callable[..., tuple[Tensor, ...]]


def local_values(mesh: DeviceMesh) -> LocalValues:
    """A function from DTensors, of which each process of ``mesh`` holds a copy, to their local values."""
    return _Local.apply if _is_usable(mesh) else to_local


def to_local(*parameters: Any) -> tuple[Tensor, ...]:
    """The same with torch's function."""
    values = tuple(parameter.to_local() for parameter in parameters)
    for value in values:
        if value.requires_grad:
            value.register_hook(torch.clone)
    return values


class _Local(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *parameters: Any) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.layouts = [(parameter._spec, parameter.stride()) for parameter in parameters]
        # Views, which torch does not let a module change in place.
        values = tuple(value.view_as(value) for value in (parameter.to_local() for parameter in parameters))
        if not all(ctx.needs_input_grad):  # frozen parameters
            pairs = zip(values, ctx.needs_input_grad, strict=True)
            ctx.mark_non_differentiable(*[value for value, needs_gradient in pairs if not needs_gradient])
        return values

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(map(_shared, gradients, ctx.layouts))


def _shared(gradient: Tensor | None, layout: tuple[Any, tuple[int, ...]]) -> Tensor | None:
    if gradient is None:
        return None
    spec, stride = layout
    if not torch.is_grad_enabled():
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        if type(gradient) is Tensor and gradient.stride() == stride:
            return DTensor(gradient, spec, requires_grad=False)  # type: ignore[no-untyped-call]
    # The gradient of a gradient, a tensor of another class, or a parameter with another stride.
    return DTensor.from_local(gradient, spec.mesh, spec.placements, run_check=False)


@functools.cache
def _is_usable(mesh: DeviceMesh) -> bool:
    return is_usable("the local values of shared parameters", lambda: probe(mesh))


def probe(mesh: DeviceMesh) -> None:
    """The gradient of one parameter: as of ``to_local``, and usable by an operation."""
    value = torch.tensor([0.5, -1.5], dtype=torch.float32, device=mesh.device_type)
    gradients = []
    for function in (_Local.apply, to_local):
        parameter: Any = DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False).requires_grad_()
        (local,) = function(parameter)
        (local * local).sum().backward()
        gradients.append(parameter.grad)
    found, expected = ((g.placements, g.device_mesh, g.stride(), (g + g).to_local().tolist()) for g in gradients)
    if found != expected:
        raise ArithmeticError(f"the gradient of a local value is {found}, that of to_local {expected}")
