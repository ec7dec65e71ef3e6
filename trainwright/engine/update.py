"""One update of the weights, composed before the first step: from losses to gradients, clipping, and the step."""

import copy
import inspect
import math
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright._torch_compat.optimizer_import import PlainUpdate
from trainwright.base.dist import gather_over_data, get_averaging_size
from trainwright.base.errors import ConfigError
from trainwright.base.signatures import read_signature
from trainwright.engine.accumulation import (
    AllGroups,
    WindowMean,
)
from trainwright.engine.extra_parameters import synchronized
from trainwright.engine.gradient_sync import GradientSync, Replica
from trainwright.events.phases import PhaseTimes
from trainwright.events.storage import find_event_storage
from trainwright.models.targets import LossIgnores, TargetCounter
from trainwright.optim.clip import gradient_clipper, gradient_norm
from trainwright.optim.fused import keep_possible_kernels
from trainwright.optim.named import NamedOptimizers, each_optimizer
from trainwright.optim.schedules import check_rates
from trainwright.optim.skip import ScaledStep, SkipNonFinite
from trainwright.parallel.mesh import computing_device
from trainwright.parallel.optimizer_probe import check_steps_of_parts, differentiates_gradients
from trainwright.parallel.simulated import simulation

Reader = Callable[[], Any]  # returns the next batch
_MAX_COUNTS = 10_000  # far more than the iterations between two checks of the losses


class Update:
    """``begin`` a window, ``backward`` for each micro-batch, and ``finish``: clip, step, set gradients to None.

    Args:
        step, zero_grad: the calls that step the optimizer and set its gradients to None.
        accumulates: whether windows have more than one micro-batch.
        max_norm, max_value: the clipping norm or value of groups that set none themselves; None: no clipping.
        count: returns the number of samples of a batch, if it is not the size of its tensors.
        differentiate: the backward pass, if it is not torch's own.
        replica: what averages the gradients of several processes; None: one process.
        count_all: the samples of all processes in the window that starts; 0: unknown.
        is_staged: the model is cut into pipeline stages, of which only the last one ``has_loss``. ``record_loss`` is
            then called once for a window, not in each ``backward``.
        criterion: returns the loss of outputs and labels, if the model computes none.
        label_names: the fields of a batch with the labels of the model's loss.
        loss_ignores: the setting.
        mean: weighs the micro-batches, if another update of the run has begun to.
        before_step: called when the gradients are complete.

    Attributes:
        is_window_end: whether the current micro-batch is the last of its window.
        is_counted: whether the share of the current batch in its window has been computed.
        closure: of an optimizer whose step may need one, such as LBFGS; the caller sets its ``recompute``.
        clip_only: clips without recording the norm.
        begin: called with the length of the window that starts and what reads a batch; returns what reads its batches.
        differentiate: the backward pass of a share, for steps that weight the loss by ``mean`` themselves.
        has_differentiated, has_finished: whether ``backward`` and ``finish``, or a step of the user's in their place,
            were called.
        prepares_early: whether the gradients are prepared after the last backward pass, for an update of the user's.
        record: called with the model's outputs for a batch before its ``backward``.
        record_loss: called with each loss that decides whether the update is skipped.
        groups: the parameter groups of all optimizers that step in an update.
        device: of the means over several processes; None: there is one.
        untrained: trainable parameters that no optimizer holds; their gradients do not outlive an update either.
        is_prepared, is_stepping: whether ``prepare`` has run for the next ``finish``, and whether ``finish`` runs.
        counted_targets: by iteration, of the latest ones; None: :meth:`count_targets` was not called.
        count_batch: records them for a loss and its batch, where another class differentiates; None: as above.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        step: Callable[..., Any],
        zero_grad: Callable[[], Any],
        *,
        accumulates: bool,
        skip_non_finite: bool,
        max_norm: float | None = None,
        max_value: float | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
        count: Callable[[Any], int] | None = None,
        differentiate: Callable[..., None] | None = None,
        replica: GradientSync | None = None,
        count_all: Callable[[], int] = lambda: 0,
        is_staged: bool = False,
        has_loss: bool = True,
        criterion: Callable[[], Any] = lambda: None,
        label_names: Sequence[str] | None = None,
        loss_ignores: LossIgnores = "declared",
        mean: WindowMean | None = None,
        before_step: Callable[[], None] | None = None,
    ) -> None:
        self.is_window_end, self.batch = True, None
        self.is_prepared = self.is_stepping = False
        self.is_counted = self.has_differentiated = self.has_finished = self.prepares_early = False
        self.phases = PhaseTimes()
        self.grad_scaler, self.max_norm, self.max_value = grad_scaler, max_norm, max_value
        self.skips, self._is_staged = skip_non_finite, is_staged
        self._plain_step, self._zero_grad, self.sync = step, zero_grad, replica
        self.untrained: Sequence[Tensor] = ()
        self.counted_targets: dict[int, Any] | None = None
        self.count_batch: Callable[[Tensor, Any], None] | None = None
        self.device = computing_device(model) if replica is not None else None
        self.is_weighed = accumulates or replica is not None
        is_plain = not (self.is_weighed or grad_scaler or differentiate)
        if grad_scaler is not None:
            differentiate = differentiate or partial(_scaled_backward, grad_scaler)
        for one in each_optimizer(optimizer):
            check_rates(one)
            check_steps_of_parts(one)
            keep_possible_kernels(one)
        self.closure: Closure | None = None
        own = (one for one in each_optimizer(optimizer) if not type(one).__module__.startswith("torch.optim"))
        self._own_optimizer = next(own, None)  # one that is not torch's
        self._refusal = ""
        for one in filter(differentiates_gradients, each_optimizer(optimizer)):
            self._refusal = _second_order_refusal(one)
        differentiate = differentiate or Tensor.backward
        if not self._refusal and any(map(takes_closure, each_optimizer(optimizer))):
            refusal = _closure_refusal(
                optimizer, accumulates=accumulates, scaler=grad_scaler, skips=skip_non_finite, replica=replica
            )
            if any(map(needs_closure, each_optimizer(optimizer))):
                self._refusal = refusal
            if not refusal:
                self.closure = Closure(self, differentiate, zero_grad)
                differentiate, is_plain = self.closure.differentiate, False
        self.differentiate = differentiate
        self.groups = AllGroups(optimizer)
        self.mean = mean or WindowMean(
            targets=TargetCounter(model, criterion, gather_over_data, label_names, loss_ignores),
            count=count,
            count_all=count_all,
            num_ranks=None if replica is None else get_averaging_size(),
            device=self.device,
            is_staged=is_staged,
            has_loss=has_loss,
        )
        self.record = self.mean.record if self.is_weighed else None
        self.begin: Callable[[int, Reader], Reader] | None = self.mean.begin if self.is_weighed else None
        self._add: Callable[[Tensor, Any], None] | None = None if is_plain else self._add_share  # None: loss.backward

        self.record_loss: Callable[[Tensor], None] | None = None
        self._compose_step(optimizer, model, step)
        if before_step is not None:
            self._preparations.append(before_step)

    def _compose_step(self, optimizer: Optimizer, model: nn.Module, step: Callable[..., Any]) -> None:
        """Choose what ``finish`` does: preparations of the gradients, clipping, the step of the optimizer."""
        scaler, replica, norms = self.grad_scaler, self.sync, (self.max_norm, self.max_value)
        self._preparations: list[Callable[[], None]] = []
        if replica is not None:
            if isinstance(replica, Replica):
                replica.optimizer = self.groups
            self._preparations.append(synchronized(model, optimizer, replica.finish))
        if self.is_weighed:  # after the average, which some backward passes compute themselves: one way of rounding
            self._preparations.append(partial(self.mean.finish, self.groups))
        self._step: Callable[[Tensor | None], object] | None = None  # of the gradients' norm; None: the plain step
        if self.closure is not None:
            self._step = partial(self.closure.step, step)
        if scaler is not None:  # averaged before: all processes find the same gradients infinite
            self._preparations.append(partial(_unscale, scaler, optimizer))
            self._step = _scaled_step(scaler, optimizer)
        self.clip_only = clipper = gradient_clipper(optimizer, *norms)
        if self.skips:
            together = None if replica is None else dist.all_reduce
            skip = SkipNonFinite(optimizer, model.buffers(), grad_scaler=scaler, sum_over_ranks=together)
            self._use_skip(skip)
            clipper, self._step = gradient_norm(optimizer, *norms), recorded_step(skip)
        self._clip = recorded_norm(clipper, is_scaled=scaler is not None)

    @property
    def is_window_begin(self) -> bool:
        """Whether the current micro-batch is the first of its window."""
        return len(self.mean.weights) <= self.is_counted

    def check_step(self) -> None:
        """Raise if ``finish`` cannot step the optimizer because it needs a closure, or a graph of the gradients."""
        if self._refusal:
            raise ConfigError(self._refusal)

    def backward(self, loss: Tensor, batch: Any) -> None:
        """Add the gradients of the share that a micro-batch's mean loss has in the window."""
        start = time.perf_counter()
        self.has_differentiated = True
        if self._add is None:
            loss.backward()  # type: ignore[no-untyped-call]
        else:
            self._add(loss, batch)
        if self.prepares_early and self.is_window_end:
            self.prepare()
        self.phases.backward += time.perf_counter() - start

    def _add_share(self, loss: Tensor, batch: Any) -> None:
        self.differentiate(self.mean.share(loss, batch))

    def count_targets(self) -> None:
        """Record how many targets an update of one batch has, if its loss may be NaN: nothing can read it again."""
        if self.counted_targets is not None or self.is_weighed or self.skips:  # a weighed loss without targets is 0
            return
        found, add, counter = dict[int, Any](), self._add, copy.copy(self.mean.counter)

        def count(loss: Tensor, batch: Any) -> None:
            may_be_nan = simulation() is None and (not loss.is_cpu or math.isnan(loss.item()))  # a device is not read
            if may_be_nan and (storage := find_event_storage()) is not None:
                if not counter.is_decided:
                    counter.decide(None, batch)
                found[storage.iter] = counter.count(batch, 1)
                if len(found) > _MAX_COUNTS:
                    del found[next(iter(found))]

        def count_and_add(loss: Tensor, batch: Any) -> None:
            count(loss, batch)
            if add is None:
                loss.backward()  # type: ignore[no-untyped-call]
            else:
                add(loss, batch)

        self._add, self.counted_targets, self.count_batch = count_and_add, found, count

    def finish_window(self) -> None:
        """Divide the gradients by the tokens of the window, if these are known after it only."""
        self.mean.finish(self.groups)

    def prepare(self) -> None:
        """Average the gradients over all processes and unscale them; ``finish`` does this unless it is already done."""
        if not self.is_prepared:
            self.is_prepared = True
            for do in self._preparations:
                do()

    def clear_also(self, untrained: Sequence[Tensor]) -> None:
        """Set the gradients of further parameters to None at the end of each update."""
        if untrained and not self.untrained:
            self._zero_grad = in_turn([self._zero_grad, self.clear_untrained])
        self.untrained = untrained

    def clear_untrained(self) -> None:
        for parameter in self.untrained:
            parameter.grad = None

    def continue_window(self, other: "Update") -> None:
        """Continue the window of another update, whose optimizer was replaced."""
        self.clear_also(other.untrained)
        if other.counted_targets is not None:
            self.count_targets()
        self.is_window_end, self.batch = other.is_window_end, other.batch

    def release(self) -> None:
        """After an update of the user's own instead of ``finish``: the next update is prepared again."""
        if self.is_prepared:
            self.is_prepared = False
            if self.grad_scaler is not None:  # it unscales once between two updates of its scale
                self.grad_scaler.update()

    def finish(self) -> None:
        """After the last micro-batch: average and clip the gradients, step the optimizer, set gradients to None."""
        start = time.perf_counter()
        if self._preparations:
            self.prepare()
        self.is_prepared, self.is_stepping, self.has_finished = False, True, True
        norm = None if self._clip is None else self._clip()
        try:
            if self._step is None:
                self._plain_step()
            else:
                self._step(norm)
        except RuntimeError as error:
            self._explain_step(error)
            raise
        self._zero_grad()
        self.is_stepping = False
        self.phases.optimizer += time.perf_counter() - start

    def _explain_step(self, error: RuntimeError) -> None:
        if self._own_optimizer is not None and "does not have a grad_fn" in str(error):
            raise ConfigError(_second_order_refusal(self._own_optimizer)) from error

    def _use_skip(self, skip: SkipNonFinite) -> None:
        """Inform ``skip`` of each window's begin and of its losses."""
        begin = self.begin

        def begin_window(length: int, read: Reader) -> Reader:
            skip.begin()
            return read if begin is None else begin(length, read)

        def recorded_backward(loss: Tensor, batch: Any) -> None:
            skip.record_loss(loss)
            self.differentiate(loss)

        def recorded_share(loss: Tensor, batch: Any) -> None:
            share = self.mean.share(loss, batch)  # of a batch without targets, whose mean is NaN, it is 0
            skip.record_loss(share)
            self.differentiate(share)

        self.begin, self.record_loss = begin_window, skip.record_loss
        if not self._is_staged:
            self._add = recorded_share if self.is_weighed else recorded_backward


class Closure:
    """Loss and gradients of the current batch, for an optimizer that computes them several times in a step.

    The first call returns the loss that the step has computed already.

    Attributes:
        recompute: called with the batch: forward and backward pass.
    """

    def __init__(self, update: Update, differentiate: Callable[..., None], zero_grad: Callable[[], Any]) -> None:
        self.recompute: Callable[[Any], object] | None = None
        self._update, self._differentiate, self._zero_grad = weakref.proxy(update), differentiate, zero_grad
        self._loss: Tensor | None = None
        self._is_current = False

    def differentiate(self, loss: Tensor, **options: Any) -> None:
        """Backward pass; the loss is the next one that the optimizer gets."""
        self._loss = loss.detach()
        self._differentiate(loss, **options)

    def step(self, step: Callable[[Any], Any], norm: Tensor | None) -> None:
        """Call ``step`` with the closure. Gradients are clipped already."""
        self._is_current = True
        step(self._evaluate)

    @torch.enable_grad()
    def _evaluate(self) -> Tensor | None:
        if self._is_current:
            self._is_current = False
        else:
            assert self.recompute is not None, "set before the first step"
            self._zero_grad()
            self.recompute(self._update.batch)
            if self._update.clip_only is not None:
                self._update.clip_only()
        return self._loss


def _second_order_refusal(optimizer: Optimizer) -> str:
    return (
        f"{type(optimizer).__name__} ({type(optimizer).__module__}): its step differentiates the gradients, which have"
        " no graph after the backward pass of the trainer. Override train_step (of a DefaultTrainer: run_step): call"
        " loss.backward(create_graph=True), step the optimizer and set its gradients to None."
    )


def _closure_refusal(optimizer: Optimizer, *, accumulates: bool, scaler: Any, skips: bool, replica: Any) -> str:
    reasons = {
        "accumulated gradients; make each update of one batch": accumulates,
        "float16, whose gradients are scaled; use bfloat16 or float32": scaler is not None,
        "non_finite='skip'; use 'stop' or 'warn'": skips,
        "several processes, which would need equal losses; use one process": replica is not None,
        "other optimizers; write a train_step that calls optimizer.step(closure)": len(each_optimizer(optimizer)) > 1,
    }
    kind = next(type(one).__name__ for one in each_optimizer(optimizer) if takes_closure(one))
    found = [text for text, is_so in reasons.items() if is_so]
    return f"{kind} computes loss and gradients several times in a step; this excludes {found[0]}." if found else ""


def recorded_norm(
    clip: Callable[[], Tensor] | None, *, is_scaled: bool = False, name: str | None = "grad_norm"
) -> Callable[[], Tensor] | None:
    """``clip``, whose norm is also stored as ``name``, unless that is None; None if ``clip`` is None.

    ``is_scaled``: a gradient scaler skips updates with infinite norms, so no other check is needed
    (:class:`~trainwright.hooks.FiniteCheck` checks values stored with ``smoothing_hint=True``).
    """
    if clip is None or name is None:
        return clip

    def clip_and_put() -> Tensor:
        norm = clip()
        if (storage := find_event_storage()) is not None:  # not in a user's own loop
            storage.put_scalar(name, norm, smoothing_hint=not is_scaled)
        return norm

    return clip_and_put


def recorded_step(skip: SkipNonFinite) -> Callable[[Tensor | None], None]:
    """The step of ``skip``, which also stores whether it was skipped as ``skipped_update`` (0 or 1)."""

    def step_and_put(norm: Tensor | None) -> None:
        is_skipped = skip.step(norm)
        if is_skipped is not None and (storage := find_event_storage()) is not None:
            storage.put_scalar("skipped_update", is_skipped)

    return step_and_put


def optimizer_calls(optimizer: Optimizer, accelerator: Any = None) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """The calls that step and that set gradients to None. A step with a closure takes it."""
    if isinstance(optimizer, NamedOptimizers):
        calls = [optimizer_calls(one, accelerator) for one in optimizer.optimizers.values()]
        return in_turn([step for step, _ in calls]), in_turn([zero_grad for _, zero_grad in calls])
    if accelerator is not None:
        return accelerator.prepare_optimizer(optimizer).step, optimizer.zero_grad
    if takes_closure(optimizer):
        return lambda closure=None: optimizer.step(closure), optimizer.zero_grad
    updater = PlainUpdate(optimizer)
    return updater.step, updater.zero_grad


def takes_closure(optimizer: Optimizer) -> bool:
    """Whether a step may call a function that computes loss and gradients again.

    An optimizer with ``step(closure=None)`` may need it, as SAM does. Those of torch do not, and one that calls it once
    gets the same numbers: the first call returns the loss that was computed.
    """
    first = _first_parameter(optimizer)
    is_optional = first is not None and first.name == "closure" and first.default is None
    return needs_closure(optimizer) or (is_optional and not type(optimizer).step.__module__.startswith("torch."))


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether each step needs a function that computes loss and gradients again, as LBFGS does."""
    first = _first_parameter(optimizer)
    return first is not None and first.default is inspect.Parameter.empty


def _first_parameter(optimizer: Optimizer) -> inspect.Parameter | None:
    """The first positional parameter of ``step``."""
    # The method of the class: a schedule replaces the method of the instance.
    _, *parameters = read_signature(type(optimizer).step).parameters.values()
    positional = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    return parameters[0] if parameters and parameters[0].kind in positional else None


def in_turn(calls: Sequence[Callable[..., Any]]) -> Any:
    """One call that makes all calls; None if there are none."""
    if len(calls) < 2:
        return calls[0] if calls else None

    def call_all(*arguments: Any) -> None:
        for call in calls:
            call(*arguments)

    return call_all


def _scaled_backward(grad_scaler: torch.amp.GradScaler, loss: Tensor, **options: Any) -> None:
    grad_scaler.scale(loss).backward(**options)  # type: ignore[no-untyped-call]


def _scaled_step(grad_scaler: torch.amp.GradScaler, optimizer: Optimizer) -> Callable[[Tensor | None], None]:
    scaled = ScaledStep(grad_scaler, optimizer)

    def step(norm: Tensor | None) -> None:
        scaled()
        grad_scaler.update()

    return step


def _unscale(grad_scaler: torch.amp.GradScaler, optimizer: Optimizer) -> None:
    try:
        grad_scaler.unscale_(optimizer)
    except AssertionError as error:  # it has not scaled any loss yet
        raise ConfigError(
            "float16: the gradients are not scaled. Call self.backward(loss) instead of loss.backward()."
        ) from error


def refuse_sparse_gradients(model: nn.Module, optimizer: Optimizer, update: Update) -> None:
    """Raise if ``update`` would clip sparse gradients, or compare them with infinity: torch has no norm of them.

    Raises:
        ConfigError: with the name of the module.
    """
    limits = {"clip_grad_max_norm": update.max_norm, "clip_grad_value": update.max_value}
    clipped: set[int] = set()
    for one in each_optimizer(optimizer):
        for group in one.param_groups:
            if update.skips or any(group.get(name, limit) is not None for name, limit in limits.items()):
                clipped.update(map(id, group["params"]))
    for name, module in model.named_modules() if clipped else ():
        is_sparse = isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
        if is_sparse and id(module.weight) in clipped:
            raise ConfigError(
                f"{name or type(model).__name__} ({type(module).__name__}) has sparse=True; clipping of gradients and"
                " non_finite='skip' need dense gradients. Build it with sparse=False, or turn these off."
            )
