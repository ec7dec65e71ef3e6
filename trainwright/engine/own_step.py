"""A user's own step with the settings of the run: ``backward``, ``clip_gradients``, ``step``.

These methods work as the trainer's own step does: precision, accumulation, clipping, several processes, non-finite
updates. A step that calls ``loss.backward()`` and ``optimizer.step()`` itself causes one warning that lists the
settings it bypasses.
"""

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from trainwright._torch_compat.optimizer_import import mark_stepped
from trainwright._torch_compat.tensor_chunks import checksum
from trainwright.base.dist import get_world_size
from trainwright.base.errors import ConfigError, ConfigKeyError, did_you_mean
from trainwright.engine.accumulation import scale_gradients
from trainwright.engine.extra_parameters import check_replaced, extra_optimizers
from trainwright.engine.gradient_sync import (
    average_before_own_steps,
    average_gradients,
    share_buffers_next,
)
from trainwright.engine.update import Update, needs_closure, optimizer_calls, recorded_norm, recorded_step
from trainwright.hooks.base import HookBase, has_failed
from trainwright.models.outputs import scalars_of
from trainwright.optim.clip import clip_by_norm, gradient_clipper, gradient_norm
from trainwright.optim.named import NamedOptimizers, by_name, each_optimizer, parameters_of
from trainwright.optim.skip import ScaledStep, SkipNonFinite
from trainwright.parallel.mesh import current_mesh

if TYPE_CHECKING:
    from trainwright.engine.run import Run
    from trainwright.engine.step import Step

logger = logging.getLogger("trainwright.engine")

_MANY_WITHOUT_STEP = 10
_MANY_WITH_GRADIENTS = 20  # without a step: it may accumulate them
_MANY_OF_LOOP = 100


class OwnStep(HookBase):
    """``trainer.backward``, ``clip_gradients`` and ``step``, for any number of optimizers.

    ``methods``: a step of the user's own is an override of one of these. Of ``loops``, other methods that make steps,
    it is only watched whether they make some.

    The gradient scaler is updated once per update of the trainer, after all optimizers have stepped: the gradients of
    one may have been scaled before another one stepped.
    """

    slot = "step"

    def __init__(self, run: "Run", methods: Iterable[str], loops: Iterable[str] = ()) -> None:
        self._run, self._methods, self._loops = weakref.proxy(run), tuple(methods), tuple(loops)
        self._parts: dict[int, _OptimizerPart] = {}  # by id; the part keeps its optimizer alive
        self._first: _FirstWindow | None = None
        self._averaged: list[RemovableHandle] = []

    # Called by the trainer's public methods.

    def backward(self, loss: Tensor, *, optimizer: Any, inputs: Sequence[Tensor] | None, retain_graph: bool) -> None:
        update = self._run.update
        update.has_differentiated = True
        parts = self._parts_of(optimizer)
        for part in parts if optimizer is not None else self._parts.values():
            part.record_loss(loss)
        if (optimizer is not None or inputs is not None) and current_mesh() is not None:
            raise ConfigError(
                "backward: optimizer= and inputs= compute the gradients of some parameters only, which needs all of a"
                " parameter on each process; it is not available with zero_stage or a split model. Use"
                " self.toggled(optimizer) around the forward pass."
            )
        if optimizer is not None and inputs is None:
            inputs = [parameter for parameter in parts[0].parameters() if parameter.requires_grad]
        if self._first is not None and not update.is_counted:
            self._first.see_gradients()
        options: dict[str, Any] = {} if inputs is None else {"inputs": inputs}
        if retain_graph:
            options["retain_graph"] = True
        # A backward pass that is not the first of its batch, or not of all parameters, cannot average.
        if (update.is_counted or inputs is not None) and update.sync is not None:
            update.sync.average_after_backward()
        if update.count_batch is not None and update.batch is not None:  # None: read by the user's own code
            update.count_batch(loss, update.batch)
        share = update.mean.share_again(loss) if update.is_counted else update.mean.share(loss, update.batch)
        update.is_counted = True
        update.differentiate(share, **options)

    def clip_gradients(self, max_norm: float | None, norm_type: float, optimizer: Any) -> Tensor | None:
        if not self._run.update.is_window_end:
            return None
        if optimizer is None and isinstance(self._run.optimizer, NamedOptimizers):
            names = " or ".join(map(repr, by_name(self._run.optimizer)))
            raise ConfigError(f"clip_gradients: this run has several optimizers; pass optimizer={names}.")
        (part,) = self._parts_of(optimizer)
        self._make_ready(part)
        part.clip(max_norm, norm_type)
        return part.norm

    def step(self, optimizer: Any) -> None:
        self._run.update.has_finished = True
        parts = self._parts_of(optimizer)  # their gradients are scaled at the window's end
        if not self._run.update.is_window_end:
            return
        for part in parts:
            if needs_closure(part.optimizer):
                raise ConfigError(
                    f"step: {type(part.optimizer).__name__} needs a closure; call optimizer.step(closure), or"
                    " override compute_loss instead of the step."
                )
            self._make_ready(part)
            if not part.is_clipped:
                part.clip(None, 2.0)
            self._run.update.is_stepping = True
            try:
                part.step()
            finally:
                self._run.update.is_stepping = False
        self._run.update.is_prepared = False
        self._run.update.clear_untrained()

    def zero_grad(self, optimizer: Any) -> None:
        if self._run.update.is_window_begin:
            (self._run.optimizer if optimizer is None else self._optimizer_of(optimizer)).zero_grad()

    @contextmanager
    def toggled(self, optimizer: Any) -> Iterator[None]:
        own = {id(parameter) for parameter in parameters_of(self._optimizer_of(optimizer))}
        every = parameters_of(self._run.optimizer)
        others = [parameter for parameter in every if parameter.requires_grad and id(parameter) not in own]
        try:
            for parameter in others:
                parameter.requires_grad_(False)
            yield
        finally:
            for parameter in others:
                parameter.requires_grad_(True)

    def see_returned(self, logs: Any) -> None:
        """Called with what the step of the user's own has returned for a batch."""
        if self._first is not None and isinstance(logs, Mapping):
            self._first.see_returned(logs)

    def watch_returned(self, step: "Step") -> None:
        """See what ``step.train``, the user's own, returns, while optimizer steps are waited for."""
        train = step.train

        def watched(model: Any, batch: Any) -> Any:
            logs = train(model, batch)
            self.see_returned(logs)
            if self._first is None or self._first.has_decided:
                step.train = train
            return logs

        if self._first is not None:
            step.train = watched

    def see_base(self) -> None:
        """Called by the ``train_step`` of a ``DefaultTrainer``, which makes no step: an override that calls it does."""
        if self._first is not None:
            self._first.calls_base = True

    # Hook methods.

    def before_estimate(self) -> None:
        self.before_train()

    def before_train(self) -> None:
        own, loops = ([one for one in names if self._run.overrides.has(one)] for names in (self._methods, self._loops))
        self.due = None if own or loops else ()  # and once the user's code has made a part, see _part_of
        if own or loops:
            name = f"{self._run.overrides.kind}.{' and '.join(loops or own)}"
            self._first = _FirstWindow(
                self._run,
                name,
                has_early_step="run_step" in own,
                is_loop=bool(loops),
                is_stepped=own == ["training_step"],
            )
            self.watch_optimizers()

    def after_train(self) -> None:
        if self._first is not None and not has_failed(self._run.trainer):
            self._first.end()
        self._stop_watching()
        self._forget_optimizers()
        self._parts.clear()

    def watch_optimizers(self) -> None:
        """With several processes: average the gradients before each step that the user's code makes itself."""
        self._forget_optimizers()
        if get_world_size() == 1 or not self._run.overrides.has(*self._methods):
            return
        own = each_optimizer(self._run.optimizer)
        others = [part for part in extra_optimizers(self._run.trainer).values() if isinstance(part, Optimizer)]
        check_replaced(self._run.model, {type(one).__name__: one for one in others})
        finish = lambda: self._run.update.finish_window()  # noqa: E731  # of the current update
        sync = lambda: self._run.update.sync  # noqa: E731
        is_ours = lambda: self._run.update.is_stepping  # noqa: E731
        self._averaged = [average_before_own_steps(one, is_ours, finish, sync) for one in (*own, *others)]

    def _forget_optimizers(self) -> None:
        for handle in self._averaged:
            handle.remove()
        self._averaged = []

    def after_step(self) -> None:
        if self._parts:
            self._update_scale()
        for part in self._parts.values():
            part.begin()
        if self._first is not None and self._first.is_over():
            self._first.warn()
            self._stop_watching()
        elif self._first is not None:
            self._first.count_without_step()

    # Implementation.

    def _optimizer_of(self, given: Any) -> Optimizer:
        if not isinstance(given, str):
            return given  # type: ignore[no-any-return]
        named = by_name(self._run.optimizer)
        if given not in named:
            raise ConfigKeyError(f"There is no optimizer {given!r}. {did_you_mean(given, named)}")
        return named[given]

    def _parts_of(self, given: Any) -> "list[_OptimizerPart]":
        """The parts of an optimizer or its name; of all of the trainer's if it is None."""
        all_own = each_optimizer(self._run.optimizer)
        return [self._part_of(one) for one in (all_own if given is None else [self._optimizer_of(given)])]

    def _part_of(self, optimizer: Optimizer) -> "_OptimizerPart":
        part = self._parts.get(id(optimizer))
        if part is None:
            update, own = self._run.update, self._run.optimizer
            named = by_name(own).items() if isinstance(own, NamedOptimizers) else ()
            name = next((f"grad_norm/{name}" for name, one in named if one is optimizer), None)
            name = "grad_norm" if optimizer is own else name
            part = self._parts[id(optimizer)] = _OptimizerPart(optimizer, update, self._run.model, name)
            update.groups.add(optimizer)
            self.due = None
        return part

    def _make_ready(self, part: "_OptimizerPart") -> None:
        """Complete the gradients of the optimizer: averaged over all processes and unscaled."""
        update = self._run.update
        if update.is_prepared:
            for own in self._parts_of(None):
                own.is_ready = True
        if part.is_ready:
            return
        part.is_ready = True
        if part.has_stepped:  # stepped before in this update
            self._update_scale()
        if get_world_size() > 1:
            average_gradients(part.parameters())
            share_buffers_next(update.sync)
        factor = update.mean.factor()
        if factor is not None:
            scale_gradients(part.optimizer, factor)
        if update.grad_scaler is not None and part.has_gradients():
            update.grad_scaler.unscale_(part.optimizer)

    def _update_scale(self) -> None:
        stepped = [part for part in self._parts.values() if part.has_stepped]
        scaler = self._run.update.grad_scaler
        if stepped and scaler is not None:
            scaler.update()
        for part in stepped:
            part.has_stepped = False

    def _stop_watching(self) -> None:
        if self._first is not None:
            self._first.close()
            self._first = None
            if not (self._parts or self._run.overrides.has(*self._methods)):
                self.due = ()  # a loop is watched until its first update only


class _OptimizerPart:
    def __init__(self, optimizer: Optimizer, update: Update, model: nn.Module, norm_name: str | None) -> None:
        scaler = update.grad_scaler
        self.optimizer = optimizer
        step: Callable[[], object] = optimizer_calls(optimizer)[0] if scaler is None else ScaledStep(scaler, optimizer)
        self._step: Callable[[Tensor | None], object] = lambda norm: step()
        self._is_scaled = scaler is not None
        self.skip: SkipNonFinite | None = None
        limits = update.max_norm, update.max_value
        clipper: Callable[[], Tensor] | None = gradient_clipper(optimizer, *limits)
        if update.skips:
            together = dist.all_reduce if get_world_size() > 1 else None
            self.skip = SkipNonFinite(
                optimizer, model.buffers(), grad_scaler=scaler, updates_scale=False, sum_over_ranks=together
            )
            clipper, self._step = gradient_norm(optimizer, *limits), recorded_step(self.skip)
        self._clip = recorded_norm(clipper, is_scaled=scaler is not None, name=norm_name)
        self.record_loss: Callable[[Tensor], None] = lambda loss: None
        if self.skip is not None:
            self.record_loss = self.skip.record_loss
        self.norm: Tensor | None = None
        self.is_ready = self.is_clipped = self.has_stepped = False

    def parameters(self) -> list[Tensor]:
        return parameters_of(self.optimizer)

    def begin(self) -> None:
        """Called before the first forward pass of an update."""
        self.is_ready = self.is_clipped = False
        if self.skip is not None:
            self.skip.begin()

    def clip(self, max_norm: float | None, norm_type: float) -> None:
        self.is_clipped = True
        if max_norm is None:
            self.norm = None if self._clip is None else self._clip()
        else:
            self.norm = clip_by_norm(self.parameters(), max_norm, norm_type)

    def has_gradients(self) -> bool:
        return any(parameter.grad is not None for parameter in self.parameters())

    def step(self) -> None:
        if self._is_scaled and not self.has_gradients():  # the scaler would raise
            self.optimizer.step()
        else:
            self._step(self.norm)
            self.has_stepped |= self._is_scaled
        self.optimizer.zero_grad()
        self.norm, self.is_ready, self.is_clipped = None, False, False


class _FirstWindow:
    """Sees in the first update what a user's step, an override of ``name``, does without the trainer's methods."""

    def __init__(self, run: "Run", name: str, *, has_early_step: bool, is_loop: bool, is_stepped: bool) -> None:
        self._run, self._name = run, name
        self._parameters = {id(parameter) for parameter in run.model.parameters()}
        self._has_raw_step = self._has_lost_gradients = self._lacks_gradients = False
        self._lacks_raw_gradients = False
        self._num_without_step = self._checksum = 0
        self._has_any_step = self._has_unused_graph = False
        self.has_decided = False  # whether to warn of a step that steps no optimizer
        self.calls_base = False  # the train_step of a DefaultTrainer, which makes no step
        self._has_early_step = has_early_step  # within an accumulation window
        self._is_loop = is_loop  # which reads batches itself: it may accumulate those of many iterations
        self._is_stepped = is_stepped  # by the trainer, after it
        self._num_steps = Counter[int]()  # in this update, by the id of the optimizer
        run.update.has_differentiated = run.update.has_finished = False
        self._handle = register_optimizer_step_pre_hook(self._see_step)

    def is_over(self) -> bool:
        """Whether weights have changed: a step may update them in some windows only."""
        return self._has_raw_step or self._run.update.has_finished

    def see_gradients(self) -> None:
        """Check that the gradients of the window's earlier batches are still present."""
        self._has_lost_gradients |= not (self._run.update.is_window_begin or self._has_gradients())

    def _has_gradients(self) -> bool:
        return _has_gradients(self._run.update.groups)

    def see_returned(self, logs: Mapping[str, Any]) -> None:
        """Find out whether a loss was returned for others to differentiate."""
        graphs = [one.grad_fn for one in scalars_of(logs).values() if isinstance(one, Tensor) and one.grad_fn]
        self._has_unused_graph = bool(graphs) and not any(map(_is_freed, graphs))

    def count_without_step(self) -> None:
        """Warn of a step that never steps an optimizer; some do so in some iterations only."""
        if self.has_decided:
            return
        self._num_without_step += 1
        if self._num_without_step == 1:
            self._checksum = _checksum(self._run.model)
            if self._has_unused_graph and not self._is_used():
                for optimizer in each_optimizer(self._run.optimizer):
                    mark_stepped(optimizer)  # torch would warn of the order of the steps
        elif self._num_without_step >= self._patience():
            self._warn_of_no_step()

    def _patience(self) -> int:
        few = _MANY_WITH_GRADIENTS if self._is_used() else _MANY_WITHOUT_STEP
        return _MANY_OF_LOOP if self._is_loop else few

    def _is_used(self) -> bool:
        """Whether the step has done a part of an update."""
        return self._run.update.has_differentiated or self._has_any_step or self._has_gradients()

    def _calls(self) -> str:
        """What a step of the user's own calls."""
        optimizer = self._run.optimizer
        names = map(repr, by_name(optimizer)) if isinstance(optimizer, NamedOptimizers) else [""]
        steps = " and ".join(f"self.step({name})" for name in names)
        return f"{steps} after the trainer's train_step" if self.calls_base else f"self.backward(loss), then {steps}"

    def end(self) -> None:
        """At the end of a training of fewer iterations."""
        if self._num_without_step > 1 and not self.has_decided:
            self._warn_of_no_step()

    def _warn_of_no_step(self) -> None:
        self.has_decided = True
        if _checksum(self._run.model) != self._checksum:
            return  # updated without an optimizer
        if self._has_unused_graph and not self._is_used():
            logger.warning(
                "%s returns a loss with its graph, and has called neither self.backward nor self.step. Write before the"
                " return: %s.", self._name, self._calls(),
            )  # fmt: skip
        else:
            logger.warning(
                "%s has made no optimizer step in %d iterations: no parameter has changed. Write %s.",
                self._name, self._num_without_step, self._calls(),
            )  # fmt: skip

    def _refuse_two_steps(self) -> None:
        # Another optimizer, such as that of a critic, may make several steps.
        if self._is_stepped and any(self._num_steps[id(one)] > 1 for one in each_optimizer(self._run.optimizer)):
            raise ConfigError(
                f"{self._name} steps the optimizer, and the trainer does so after it: each update would be made twice."
                " Call self.backward(loss) and return the loss, or override train_step(model, inputs), which steps"
                " itself."
            )

    def warn(self) -> None:
        settings, update = {} if self._is_loop else _settings_of_step(self._run), self._run.update
        if self._lacks_gradients and not (self._is_loop or self._has_raw_step or update.has_differentiated):
            raise ConfigError(
                f"{self._name} has left no gradient in the first update: no parameter would change. It must call"
                " self.backward(loss), also where it returns the loss."
            )
        self._refuse_two_steps()
        if self._lacks_raw_gradients:
            logger.warning(
                "%s has called optimizer.step() without a gradient: it changes no parameter. Call zero_grad() before"
                " the backward pass or after the step, not between them.", self._name,
            )  # fmt: skip
        if self._has_lost_gradients:
            logger.warning(
                "%s sets gradients to None within an accumulation window (%s): only its last batch counts. Call"
                " self.zero_grad(optimizer), or nothing: self.step(optimizer) does it.",
                self._name, settings.get("accumulation"),
            )  # fmt: skip
        is_bare_backward, is_bare_step = not update.has_differentiated, self._has_raw_step or not update.has_finished
        is_lost = {
            "accumulation": is_bare_backward or self._has_early_step,
            "scaler": is_bare_backward or is_bare_step,
            "clipping": is_bare_step,
            "skip": is_bare_step,
        }
        lost = [text for name, text in settings.items() if is_lost[name]]
        instead = {"optimizer.step()": "self.step(optimizer)"} if is_bare_step else {}
        if is_bare_backward and {"accumulation", "scaler"} & settings.keys():  # otherwise self.backward does the same
            instead = {"loss.backward()": "self.backward(loss)", **instead}
        if lost and instead:
            logger.warning(
                "%s calls %s itself, so %s %s no effect. Call %s instead.", self._name, " and ".join(instead),
                ", ".join(lost), "has" if len(lost) == 1 else "have", " and ".join(instead.values()),
            )  # fmt: skip

    def close(self) -> None:
        self._handle.remove()

    def _see_step(self, optimizer: Optimizer, *given: Any) -> None:
        update, self._has_any_step = self._run.update, True
        self._num_steps[id(optimizer)] += 1
        if update.is_stepping:
            self._lacks_gradients |= not self._has_gradients()
        elif any(id(one) in self._parameters for group in optimizer.param_groups for one in group["params"]):
            # Not that of an optimizer of something else, such as the trial step of a fused optimizer.
            arguments, named = given
            needs_them = type(optimizer).__module__.startswith("torch.") and not named and len(arguments) == 1  # itself
            self._lacks_raw_gradients |= needs_them and not _has_gradients(optimizer)
            self._has_raw_step = True
            self._has_early_step |= not update.is_window_end


def _has_gradients(optimizer: Any) -> bool:
    return any(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"])


def _checksum(model: nn.Module) -> int:
    return sum(map(checksum, model.parameters()))


def _is_freed(node: Any) -> bool:
    """Whether a backward pass has freed the graph at ``node``, by the first tensors that it has saved."""
    nodes, known = [node], {node}
    for one in nodes:
        try:
            saved = [getattr(one, name) for name in dir(one) if name == "saved_tensors" or name.startswith("_saved_")]
        except RuntimeError:  # torch raises it for freed tensors
            return True
        parts = chain.from_iterable(value if isinstance(value, tuple) else [value] for value in saved)
        if any(isinstance(part, Tensor) for part in parts):
            return False
        inner = dict.fromkeys(node for node, _ in one.next_functions if node is not None and node not in known)
        nodes += inner
        known.update(inner)
    return False


def _settings_of_step(run: "Run") -> dict[str, str]:
    """The settings that a step of the user's own may bypass, by the part of the step, as the API writes them."""
    spec, update, settings = run.spec, run.update, dict[str, str]()
    if spec.windows.largest > 1:
        name = spec.name_of("gradient_accumulation_steps")
        settings["accumulation"] = f"{name}={spec.gradient_accumulation_steps}"
    if update.grad_scaler is not None:
        settings["scaler"] = "the gradient scaler of float16"
    for name, limit in (("max_grad_norm", update.max_norm), ("clip_grad_value", update.max_value)):
        if limit is not None:
            settings["clipping"] = f"{spec.name_of(name)}={limit}"
    for option in ("clip_grad_max_norm", "clip_grad_value"):  # of groups, by a config file or the user's optimizer
        if any(group.get(option) is not None for group in run.optimizer.param_groups):
            settings["clipping"] = option
    if update.skips:
        settings["skip"] = f"{spec.name_of('non_finite')}='skip'"
    return settings
