"""torch's fused optimizers, one kernel for all parameters, where they are equivalent to the plain ones.

torch uses them only if requested; by default it updates each parameter separately on CPUs. On one thread the fused
step of Adam takes 0.4 of the plain one for a tiny network and 0.2 for 3 M parameters. It rounds differently in the
last bits, so a run that started with one kind keeps it: a checkpoint's ``fused`` overrides the built optimizer.
"""

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright.optim.named import parameters_of

logger = logging.getLogger("trainwright.optim")

_CLASSES = ("Adam", "AdamW", "SGD", "Adagrad")
_CHOICES = ("fused", "foreach", "capturable", "differentiable")  # if one is set, the user has chosen
# The values of torch's constructors if these were not set.
_NOT_CHOSEN = {"fused": (None,), "foreach": (None,), "capturable": (None, False), "differentiable": (None, False)}
_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_DEVICES = ("cpu", "cuda")


def fused_arguments(
    optimizer_class: Callable[..., Any], arguments: Mapping[str, Any], params: Any, model: nn.Module
) -> dict[str, bool]:
    """``{"fused": True}`` if ``optimizer_class(params, **arguments)`` may run fused and the user has not set it.

    ``params``: parameters or groups of them, those of ``model``.
    """
    is_torchs = any(optimizer_class is getattr(torch.optim, name) for name in _CLASSES)
    groups = [arguments, *(entry for entry in _listed(params) if isinstance(entry, Mapping))]
    if not is_torchs or any(name in group for group in groups for name in _CHOICES):
        return {}
    if not _listed(params) or not _can_be_fused(optimizer_class, [*_parameters(params)], model):
        return {}  # a generator can be read only once
    assert "fused" in inspect.signature(optimizer_class).parameters, "each of the classes has it"
    logger.debug("%s runs fused; fused=False in its settings for torch's default.", optimizer_class.__name__)
    return {"fused": True}


def run_fused(optimizer: Optimizer, model: nn.Module) -> None:
    """Make a user-built optimizer step fused if it may and the user has not set it. Logs a line."""
    kind, defaults = type(optimizer), optimizer.defaults
    if kind not in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD):  # Adagrad has state from the start
        return
    groups = [defaults, *optimizer.param_groups]
    if optimizer.state or any(group.get(name) not in _NOT_CHOSEN[name] for group in groups for name in _CHOICES):
        return
    if not _can_be_fused(kind, parameters_of(optimizer), model):
        return
    for group in groups:
        group["fused"] = True
    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]  # as torch's own constructor does
    logger.info("%s runs fused; create it with fused=False for torch's default.", kind.__name__)


def may_be_fused(optimizer_class: Any, parameters: Iterable[Tensor]) -> bool:
    """Whether torch has a fused step for these parameters.

    Of those spread over processes only Adam and AdamW do; Adagrad has one on CUDA devices since torch 2.12.
    """
    if isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Adam):  # AdamW is one
        return True
    needs_cpu = optimizer_class is torch.optim.Adagrad and torch.__version__ < "2.12"
    return not any(
        hasattr(parameter, "placements") or (needs_cpu and parameter.device.type != "cpu")  # DTensors have placements
        for parameter in parameters
    )


def keep_possible_kernels(optimizer: Optimizer) -> None:
    """After the load of a checkpoint, perhaps of another layout: no fused steps where torch has none."""
    for group in optimizer.param_groups:
        if group.get("fused") and not may_be_fused(type(optimizer), group["params"]):
            group["fused"] = False


def _listed(params: Any) -> list[Any]:
    return list(params) if isinstance(params, list | tuple) else []


def _parameters(params: Any) -> Iterable[Tensor]:
    for entry in _listed(params):
        if isinstance(entry, Mapping):
            inner = entry.get("params", [])
            yield from [inner] if isinstance(inner, Tensor) else inner
        else:
            yield entry[1] if isinstance(entry, tuple) else entry  # torch accepts pairs with names, too


def _is_plain(parameter: Tensor) -> bool:
    is_strided = isinstance(parameter, Tensor) and parameter.layout is torch.strided
    return is_strided and parameter.dtype in _DTYPES and parameter.device.type in _DEVICES


def _can_be_fused(optimizer_class: Any, parameters: list[Tensor], model: nn.Module) -> bool:
    has_sparse_gradients = any(getattr(module, "sparse", False) is True for module in model.modules())
    return all(map(_is_plain, parameters)) and not has_sparse_gradients and may_be_fused(optimizer_class, parameters)
