"""The first updates of a set-up, observed once for all checks that need them."""

import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from trainwright.data.seeding import seed_everything
from trainwright.inspect.check.copies import Copies, Copy

NUM_UPDATES = 12


@dataclass
class Observed:
    """What was seen in the first updates.

    Attributes:
        losses, seconds: of each update; the first ones are slower.
        with_gradient, with_zero_gradient: names of parameters that got a gradient that is not zero, or only zeros.
        changed: names of parameters whose values changed.
        optimized: names of parameters that an optimizer holds which made a step.
        inactive: names of dropout and normalization modules that were called in evaluation mode.
        first_modes, later_modes: those of ``inactive`` before and after an evaluation.
        checkpoint_bytes: of the parameters, buffers and states.
        memory_bytes: of an update: the peak of a GPU; on a CPU, of a checkpoint, the gradients, and what the forward
            pass of the first batch keeps for its backward pass.
    """

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    with_gradient: set[str] = field(default_factory=set)
    with_zero_gradient: set[str] = field(default_factory=set)
    changed: set[str] = field(default_factory=set)
    optimized: set[str] = field(default_factory=set)
    first_modes: set[str] = field(default_factory=set)
    later_modes: set[str] = field(default_factory=set)
    num_steps: int = 0
    checkpoint_bytes: int = 0
    memory_bytes: int = 0


class SetUp(Copies):
    @cached_property
    def observed(self) -> Observed:
        """The first updates of a copy, with an evaluation in the middle if there is one."""
        seen = Observed()
        new = self.make(limit_eval_batches=None if self.run.spec.overfit_batches else 1)
        before = {name: one.detach().clone() for name, one in new.model.named_parameters()}
        evaluates = bool(new.eval_loaders)
        modes = seen.first_modes
        saved: list[int] = []
        with (
            _watched(new.model, seen, lambda: modes),
            torch.enable_grad(),
            ExitStack() as of_first_update,
        ):
            if self.run.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self.run.device)
            of_first_update.enter_context(counting_saved(new.model, saved.append))
            start = time.perf_counter()

            def after() -> None:
                nonlocal modes, start
                of_first_update.close()
                if (loss := new.step_loss()) is not None:
                    seen.losses.append(loss)
                seen.seconds.append(time.perf_counter() - start)
                if len(seen.seconds) == NUM_UPDATES // 2 and evaluates:
                    modes = set()  # an evaluation is no step
                    new.run.evaluate()
                    modes = seen.later_modes
                start = time.perf_counter()

            new.train(NUM_UPDATES, after=after, needed=1)
        for name, one in new.model.named_parameters():
            if not torch.equal(one.detach(), before.get(name, one.detach() + 1)):
                seen.changed.add(name)
        seen.checkpoint_bytes, kept = bytes_of(new)
        seen.memory_bytes = kept + sum(saved)
        if self.run.device.type == "cuda":
            seen.memory_bytes = torch.cuda.max_memory_allocated(self.run.device)
        return seen

    @property
    def step_seconds(self) -> float:
        """Of one update, without the first ones."""
        times = sorted(self.observed.seconds[2:] or self.observed.seconds)
        return times[len(times) // 2]


@contextmanager
def _watched(model: nn.Module, seen: Observed, modes: Any) -> Iterator[None]:
    """Record gradients, the modules that are in evaluation mode when they are called, and steps of optimizers."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}

    def count(optimizer: Optimizer, *_: Any) -> None:
        held = {names[id(one)] for group in optimizer.param_groups for one in group["params"] if id(one) in names}
        seen.num_steps += bool(held)
        seen.optimized |= held

    with ExitStack() as undo:
        undo.enter_context(register_optimizer_step_post_hook(count))
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:

                def record(one: Tensor, name: str = name) -> None:
                    if one.grad is not None:
                        is_zero = name not in seen.with_gradient and not bool(one.grad.any())
                        (seen.with_zero_gradient if is_zero else seen.with_gradient).add(name)

                hook: Any = parameter.register_post_accumulate_grad_hook
                undo.enter_context(hook(record))
        for name, module in model.named_modules():
            if depends_on_mode(module):

                def called(one: nn.Module, *_: Any, name: str = name) -> None:
                    if not one.training and torch.is_grad_enabled():
                        modes().add(name)

                undo.enter_context(module.register_forward_pre_hook(called))
        yield


def depends_on_mode(module: nn.Module) -> bool:
    """Whether a module computes something else in evaluation: dropout, and normalization with running statistics."""
    if isinstance(module, _DropoutNd):
        return module.p > 0
    return isinstance(module, _BatchNorm) and module.track_running_stats


def counting_saved(model: nn.Module, add: Callable[[int], object]) -> Any:
    """A context that calls ``add`` with the bytes of each storage that is kept for backward passes."""
    own = {one.untyped_storage().data_ptr() for one in (*model.parameters(), *model.buffers())}

    def pack(tensor: Tensor) -> Tensor:
        if type(tensor) is Tensor and (place := tensor.untyped_storage().data_ptr()) not in own:
            own.add(place)
            add(tensor.untyped_storage().nbytes())
        return tensor

    return saved_tensors_hooks(pack, lambda tensor: tensor)


def bytes_of(copied: Copy) -> tuple[int, int]:
    """The bytes of a checkpoint; and of it together with the gradients."""
    model, states = copied.model, [state for one in copied.optimizers for state in one.state.values()]
    kept = [*model.parameters(), *model.buffers(), *(value for state in states for value in state.values())]
    checkpoint = sum(one.nbytes for one in kept if isinstance(one, Tensor))
    return checkpoint, checkpoint + sum(one.nbytes for one in model.parameters() if one.requires_grad)


_FEWEST = 256  # values of a parameter that can be judged by their distribution
_LEVEL = 0.01  # a distribution less likely than this is another one


def at_initial_values(setup: SetUp, names: Sequence[str]) -> list[str]:
    """Those of the parameters whose values are random: no weights were loaded, and nothing has trained them.

    Config files: a model that is built with another seed has other values there. Objects: the distribution of the
    values is the one that ``reset_parameters`` of the module gives; parameters with few values are not judged.
    """
    run = setup.run
    models = []
    for seed in (1, 2):
        seed_everything(seed)
        if (model := run.rebuild_model()) is not None:
            models.append(dict(model.named_parameters()))
    if models:
        first, second = models
        return [name for name in names if name in first and not torch.equal(first[name], second[name])]
    judged = {name: _has_initial_distribution(run.model, name) for name in names}
    loaded = {name.rpartition(".")[0] for name, is_random in judged.items() if is_random is False}
    return [name for name, is_random in judged.items() if is_random and name.rpartition(".")[0] not in loaded]


def _has_initial_distribution(model: nn.Module, name: str) -> bool | None:
    """None: it cannot be judged."""
    path, _, last = name.rpartition(".")
    module: Any = model.get_submodule(path)
    value = getattr(module, last)
    if value.numel() < _FEWEST or not callable(getattr(module, "reset_parameters", None)):
        return None
    fresh = copy.deepcopy(module)
    fresh.reset_parameters()
    other = getattr(fresh, last).detach()
    if not float(other.float().std()) or torch.equal(other, value):  # all values are one constant
        return None
    return same_distribution(value.detach(), other)


def same_distribution(first: Tensor, second: Tensor) -> bool:
    """Whether two samples may be of one distribution: the test of Kolmogorov and Smirnov.

    >>> torch.manual_seed(0) and same_distribution(torch.randn(500), torch.randn(500))
    True
    >>> same_distribution(torch.randn(500), 2 * torch.randn(500))
    False
    """
    first, second = (one.flatten().double().cpu()[:100_000].sort().values for one in (first, second))
    values = torch.cat([first, second])
    shares = [torch.searchsorted(one, values, right=True) / len(one) for one in (first, second)]
    distance = float((shares[0] - shares[1]).abs().max())
    number = len(first) * len(second) / (len(first) + len(second))
    level = 2 * sum((-1) ** (k - 1) * math.exp(-2 * k * k * number * distance**2) for k in range(1, 50))
    return level > _LEVEL or distance == 0
