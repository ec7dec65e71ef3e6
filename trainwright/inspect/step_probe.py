"""What happens inside one step: the loss of each sample, gradient norms, the first result that is not finite."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainwright._torch_compat.tensor_chunks import is_dtensor
from trainwright.base.dist import all_gather_object, get_world_size, reduce_over_data
from trainwright.evaluation.sample_losses import LossesOfTorch
from trainwright.parallel.mesh import current_mesh

_FILLS = ("fill", "full", "empty", "masked_fill", "where", "scalar_tensor", "new_")  # a mask of -inf is no fault


@dataclass
class NonFinite:
    """The first operation whose result is not finite although its inputs are."""

    operation: str
    module: str
    phase: str
    place: str
    num_values: int


@dataclass
class StepFacts:
    """What a probe has found.

    Attributes:
        sample_losses: for each micro-batch the loss of each sample; None where no loss of torch gives them.
        gradient_norms: by parameter, of the accumulated gradients before clipping, averaged over the processes. Empty
            if the processes hold parts of the model.
        non_finite: None: all values were finite.
    """

    sample_losses: list[list[float] | None] = field(default_factory=list)
    gradient_norms: dict[str, float] = field(default_factory=dict)
    non_finite: NonFinite | None = None


@contextmanager
def probed_step(
    model: nn.Module, num_samples: Callable[[int], int], on_non_finite: Callable[[], object] | None = None
) -> Iterator[StepFacts]:
    """Record a step that runs in the context. Its results are the same by bits: it only reads.

    ``num_samples``: returns the samples of a micro-batch by its place; 0: unknown. ``on_non_finite`` is called in the
    operation that first has such a result.
    """
    facts = StepFacts()
    names = {id(one): name for name, one in model.named_modules()}
    stack: list[str] = []
    norms: dict[str, Tensor] = {}
    averages = get_world_size() > 1
    own: dict[str, Tensor] = {}  # gradients of this process

    def enter(module: nn.Module, inputs: Any) -> None:
        if id(module) in names:
            stack.append(names[id(module)] or type(module).__name__)

    def leave(module: nn.Module, inputs: Any, outputs: Any) -> None:
        if id(module) in names and stack:
            stack.pop()

    def size() -> int:
        return num_samples(len(facts.sample_losses))

    def keep(losses: Tensor | None) -> None:
        if torch.is_grad_enabled():  # otherwise it is not the loss of the step
            facts.sample_losses.append(None if losses is None else losses.tolist())

    def record(name: str) -> Callable[[Tensor], None]:
        def norm(parameter: Tensor) -> None:
            if parameter.grad is None:
                return
            if averages:  # torch averages them later, in place
                own[name] = parameter.grad.detach().clone()
            else:
                norms[name] = torch.linalg.vector_norm(parameter.grad.detach().float())

        return norm

    with ExitStack() as undo:
        undo.callback(modules.register_module_forward_pre_hook(enter).remove)
        undo.callback(modules.register_module_forward_hook(leave, always_call=True).remove)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and parameter.is_leaf:
                handle: Any = parameter.register_post_accumulate_grad_hook(record(name))  # type: ignore[no-untyped-call]
                undo.callback(handle.remove)
        undo.enter_context(LossesOfTorch(size, keep))
        undo.enter_context(_FiniteMode(facts, stack, on_non_finite))
        yield facts
    if averages and current_mesh() is None:
        norms = _norms_of_means(model, own)
    facts.gradient_norms = {name: float(norm) for name, norm in norms.items()}


def _norms_of_means(model: nn.Module, own: dict[str, Tensor]) -> dict[str, Tensor]:
    """Norms of the gradients' means over the processes; each must call this. A process may lack some gradients."""
    used = set(chain.from_iterable(all_gather_object(list(own))))
    norms = {}
    for name, parameter in model.named_parameters():
        if name in used:
            mean = own.get(name, torch.zeros_like(parameter)).float()
            reduce_over_data(mean)
            norms[name] = torch.linalg.vector_norm(mean / get_world_size())
    return norms


class _FiniteMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # of its __init_subclass__
    """Looks at the result of each operation, until one is not finite."""

    def __init__(self, facts: StepFacts, stack: list[str], found: Callable[[], object] | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._facts, self._stack, self._found = facts, stack, found

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if self._facts.non_finite is None and not any(part in function.__name__ for part in _FILLS):
            bad = sum(map(_num_bad, tree_leaves(result)))
            if bad and not sum(map(_num_bad, tree_leaves((args, kwargs)))):
                frame = user_frame()
                self._facts.non_finite = NonFinite(
                    operation=str(function),
                    module=self._stack[-1] if self._stack else "",
                    phase="forward" if torch.is_grad_enabled() else "backward or update",
                    place=f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}" if frame else "",
                    num_values=bad,
                )
                if self._found is not None:
                    self._found()
        return result


def user_frame() -> FrameType | None:
    """The innermost frame of code that is not of torch or of this library."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name.partition(".")[0] not in ("torch", "trainwright", "contextlib", "runpy", "importlib", "pdb", "bdb"):
            return frame
        frame = frame.f_back
    return None


def _num_bad(value: Any) -> int:
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()) or value.is_meta:
        return 0
    local = value.detach().to_local() if is_dtensor(value) else value  # type: ignore[attr-defined]  # of this process
    return int((~torch.isfinite(local)).sum())
