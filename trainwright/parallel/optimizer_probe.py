"""Whether the step of an optimizer can update parameters that are divided between processes: tried on tiny ones."""

import copy
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from trainwright._torch_compat.tensor_chunks import is_dtensor
from trainwright.base.errors import ConfigError
from trainwright.parallel.simulated import simulation

# Torch's versions that raise; the others of torch are known to work.
_NEED_WHOLE_PARAMETERS = (torch.optim.Adafactor, torch.optim.Rprop)


def check_steps_of_parts(optimizer: Any) -> None:
    """Raise if the step of an optimizer cannot update parameters that are divided between processes.

    Every process must call this.
    """
    if not any(is_dtensor(parameter) for group in optimizer.param_groups for parameter in group["params"]):
        return
    kind = type(optimizer)
    if kind.__module__.startswith("torch.optim"):
        reason = "torch's version computes with complete parameters" if kind in _NEED_WHOLE_PARAMETERS else None
    elif differentiates_gradients(optimizer):
        reason = "it differentiates gradients, and those of divided parameters have no graph"
    else:
        reason = _error_of_parts(optimizer)
    if reason is not None:
        raise ConfigError(
            f"{kind.__name__} ({kind.__module__}): its step cannot update parameters that ZeRO, tensor or"
            f" expert parallelism has divided ({reason}). Use another optimizer, such as AdamW, or a layout in which"
            " each process has complete parameters: data parallelism without zero_stage, or pipeline stages."
        )


def differentiates_gradients(optimizer: Any) -> bool:
    """Whether an optimizer declares, by timm's name, that its step computes gradients of gradients, as Adahessian."""
    return bool(getattr(optimizer, "is_second_order", False))


def _error_of_parts(optimizer: Any) -> str | None:
    """The error of a step of tiny divided parameters, where the step of complete ones has none.

    A copy of the optimizer makes these steps; its own state does not change. None also where that cannot be tried: it
    has state already, needs a closure, or cannot be copied.
    """
    if optimizer.state or simulation() is not None:
        return None
    for is_divided in (False, True):
        with torch.random.fork_rng(devices=[]):  # some optimizers add noise
            try:
                tiny = _with_tiny_parameters(optimizer, is_divided=is_divided)
                for _ in range(2):  # the first step often only creates the state
                    type(tiny).step(tiny)
            except Exception as error:  # the code of an optimizer can raise any error
                text = str(error).partition("\n")[0].partition(", need to convert")[0]
                return f"{type(error).__name__}{': ' * bool(text)}{text}" if is_divided else None
    return None


def _with_tiny_parameters(optimizer: Any, *, is_divided: bool) -> Any:
    """A copy of an optimizer, with one parameter and a gradient for each kind of parameters in each group."""
    replaced: dict[int, Any] = {}
    kinds: dict[Any, Tensor] = {}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            layout = (parameter.device_mesh, parameter.placements) if is_dtensor(parameter) else None
            kind = (number, parameter.dim(), parameter.dtype, parameter.requires_grad, layout)
            if kind not in kinds:
                kinds[kind] = _tiny(parameter, is_divided=is_divided)
            replaced[id(parameter)] = kinds[kind]
    # Hooks are those of the run, and a schedule replaces the method on the instance by one that steps the original.
    state = {name: value for name, value in vars(optimizer).items() if name != "step"}
    replaced |= {id(value): OrderedDict() for name, value in state.items() if name.endswith("_hooks")}
    own: Any = type(optimizer)
    tiny: Any = own.__new__(own)
    vars(tiny).update(copy.deepcopy(state, replaced))
    for group in tiny.param_groups:
        group["params"] = [*{id(parameter): parameter for parameter in group["params"]}.values()]
    return tiny


def _tiny(parameter: Any, *, is_divided: bool) -> Tensor:
    """A parameter with a gradient that has as many dimensions as another one, and is divided alike."""
    sizes = [2] * parameter.dim()
    if is_dtensor(parameter):
        for place, placement in enumerate(parameter.placements):
            if placement.is_shard():
                sizes[placement.dim] *= parameter.device_mesh.size(place)
    values = torch.linspace(0.5, 1, torch.Size(sizes).numel(), device=parameter.device).reshape(sizes)

    def divided(values: Tensor) -> Tensor:
        from torch.distributed.tensor import distribute_tensor

        values = values.to(parameter.dtype)
        if not (is_divided and is_dtensor(parameter)):
            return values
        return distribute_tensor(values, parameter.device_mesh, parameter.placements, src_data_rank=None)

    tiny = nn.Parameter(divided(values), requires_grad=parameter.requires_grad)
    if parameter.requires_grad:
        tiny.grad = divided(values / 2)
    return tiny
