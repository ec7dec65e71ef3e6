"""torch's fused optimizers, one kernel for all parameters, where they are equivalent to the plain ones.

torch uses them only if requested; by default it updates each parameter separately on CPUs. On one thread the fused
step of Adam takes 0.4 of the plain one for a tiny network and 0.2 for 3 M parameters. It rounds differently in the
last bits, so a run that started with one kind keeps it: a checkpoint's ``fused`` overrides the built optimizer.
"""

import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright.optim.named import parameters_of

logger = logging.getLogger("trainwright.optim")

_CLASSES = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
# Settings with the values of torch's constructors: with another one, the user has chosen.
_NOT_CHOSEN = {"fused": (None,), "foreach": (None,), "capturable": (None, False), "differentiable": (None, False)}
_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_DEVICES = ("cpu", "cuda")


def run_fused(optimizer: Optimizer, model: nn.Module, *, level: int = logging.DEBUG) -> None:
    """Make a new optimizer step fused if it may and the user has not set it; logs a line at ``level``."""
    kind = type(optimizer)
    if kind not in _CLASSES:
        return
    groups = [optimizer.defaults, *optimizer.param_groups]
    is_chosen = any(group.get(name) not in values for group in groups for name, values in _NOT_CHOSEN.items())
    is_new = not any(state.get("step", True) for state in optimizer.state.values())  # Adagrad has states from the start
    if not is_new or is_chosen or not _can_be_fused(kind, parameters_of(optimizer), model):
        return
    for group in groups:
        group["fused"] = True
    for parameter, state in optimizer.state.items():
        state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]  # as torch's own constructor does
    logger.log(level, "%s runs fused; create it with fused=False for torch's default.", kind.__name__)


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
    """Turn ``fused`` off, with a warning, where torch has no such step, as after a load from another layout."""
    for group in optimizer.param_groups if isinstance(optimizer, torch.optim.SGD | torch.optim.Adagrad) else ():
        if group.get("fused") and not may_be_fused(type(optimizer), group["params"]):
            group["fused"] = False
            logger.warning(
                "%s: fused=True has no effect on parameters that ZeRO or tensor parallelism has divided, or on their"
                " device.",
                type(optimizer).__name__,
            )


def _is_plain(parameter: Tensor) -> bool:
    is_strided = isinstance(parameter, Tensor) and parameter.layout is torch.strided
    return is_strided and parameter.dtype in _DTYPES and parameter.device.type in _DEVICES


def _can_be_fused(optimizer_class: Any, parameters: list[Tensor], model: nn.Module) -> bool:
    has_sparse_gradients = any(getattr(module, "sparse", False) is True for module in model.modules())
    return all(map(_is_plain, parameters)) and not has_sparse_gradients and may_be_fused(optimizer_class, parameters)
