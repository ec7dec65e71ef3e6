"""A user's own step with the settings of the run: ``backward``, ``clip_gradients``, ``step``.

These methods work as the trainer's own step does: precision, accumulation, clipping, several processes, non-finite
updates. A step that calls ``loss.backward()`` and ``optimizer.step()`` itself causes one warning that lists the
settings it bypasses.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from trainwright.engine.accumulation import scale_gradients
from trainwright.engine.extra_parameters import extra_optimizers
from trainwright.engine.gradient_sync import SkipTogether, average_before_own_steps, average_gradients
from trainwright.engine.update import recorded_norm, recorded_step
from trainwright.hooks.base import HookBase
from trainwright.hooks.method_overrides import is_overridden
from trainwright.optim.clip import gradient_clipper, gradient_norm
from trainwright.optim.skip import ScaledStep, SkipNonFinite
from trainwright.parallel.dist import get_world_size

logger = logging.getLogger("trainwright.engine")

_MANY_WITHOUT_STEP = 20
_STEP_METHODS = ("run_step", "train_step", "training_step", "optimization_step")


class OwnStep(HookBase):
    """``trainer.backward``, ``clip_gradients`` and ``step``, for any number of optimizers.

    The gradient scaler is updated once per update of the trainer, after all optimizers have stepped: the gradients of
    one may have been scaled before another one stepped.
    """

    def __init__(self) -> None:
        self._parts: dict[int, _OptimizerPart] = {}  # by id; the part keeps its optimizer alive
        self._weighed_step = -1  # the last micro-batch whose share of the window is computed
        self._first: _FirstWindow | None = None
        self._averaged: list[RemovableHandle] = []

    # Called by the trainer's public methods.

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        trainer = self.trainer
        self._used("backward")
        self._part_of(trainer.optimizer)
        for part in self._parts.values():
            part.record_loss(loss)
        mean, step = trainer._update.mean, trainer.state.global_step
        is_again, self._weighed_step = step == self._weighed_step, step
        if self._first is not None and not is_again:
            self._first.see_gradients()
        share = mean.share_again(loss) if is_again else mean.share(loss, trainer._update.batch)
        mean.differentiate(share, retain_graph)

    def clip_gradients(self, max_norm: float | None, norm_type: float, optimizer: Optimizer | None) -> Tensor | None:
        if not self.trainer._update.is_window_end:
            return None
        part = self._ready_part(optimizer)
        part.clip(max_norm, norm_type)
        return part.norm

    def step(self, optimizer: Optimizer | None) -> None:
        self._used("step")
        if not self.trainer._update.is_window_end:
            self._part_of(optimizer or self.trainer.optimizer)  # its gradients are scaled at the window's end
            return
        part = self._ready_part(optimizer)
        if not part.is_clipped:
            part.clip(None, 2.0)
        with self._stepping():
            part.step()
        self.trainer._update.is_prepared = False

    def zero_grad(self, optimizer: Optimizer | None) -> None:
        state = self.trainer.state
        if state.global_step <= state.step_before + 1:
            (optimizer or self.trainer.optimizer).zero_grad()

    # Hook methods.

    def before_train(self) -> None:
        trainer = self.trainer
        own = [name for name in _STEP_METHODS if is_overridden(trainer, name)]
        if not own:
            return
        self._first = _FirstWindow(trainer, own)
        self.watch_optimizers()

    def after_train(self) -> None:
        self._stop_watching()
        self._forget_optimizers()
        self._parts.clear()

    def watch_optimizers(self) -> None:
        """With several processes: average the gradients before each step that the user's code makes itself."""
        self._forget_optimizers()
        trainer = self.trainer
        if get_world_size() == 1 or not any(is_overridden(trainer, name) for name in _STEP_METHODS):
            return
        others = [part for part in extra_optimizers(trainer).values() if isinstance(part, Optimizer)]
        finish = lambda: trainer._update.mean.finish()  # noqa: E731  # of the current update
        self._averaged = [average_before_own_steps(one, self._is_ours, finish) for one in (trainer.optimizer, *others)]

    def _forget_optimizers(self) -> None:
        for handle in self._averaged:
            handle.remove()
        self._averaged = []

    def before_step(self) -> None:
        for part in self._parts.values():
            part.begin()

    def after_step(self) -> None:
        if self._parts:
            self._update_scale()
        if self._first is not None and self._first.is_over():
            self._first.warn()
            self._stop_watching()
        elif self._first is not None:
            self._first.count_without_step()

    # Implementation.

    def _part_of(self, optimizer: Optimizer) -> "_OptimizerPart":
        part = self._parts.get(id(optimizer))
        if part is None:
            part = self._parts[id(optimizer)] = _OptimizerPart(optimizer, self.trainer)
            self.trainer._update.groups.add(optimizer)
        return part

    def _ready_part(self, optimizer: Optimizer | None) -> "_OptimizerPart":
        """The optimizer's part, with complete, unscaled gradients, averaged over all processes."""
        trainer = self.trainer
        part = self._part_of(optimizer or trainer.optimizer)
        if part.is_ready or (part.optimizer is trainer.optimizer and trainer._update.is_prepared):
            part.is_ready = True
            return part
        part.is_ready = True
        if part.has_stepped:  # stepped before in this update
            self._update_scale()
        factor = trainer._update.mean.factor()
        if factor is not None:
            scale_gradients(part.optimizer, factor)
        if get_world_size() > 1:
            average_gradients(part.parameters())
        if trainer._grad_scaler is not None:
            trainer._grad_scaler.unscale_(part.optimizer)
        return part

    def _update_scale(self) -> None:
        stepped = [part for part in self._parts.values() if part.has_stepped]
        if stepped and self.trainer._grad_scaler is not None:
            self.trainer._grad_scaler.update()
        for part in stepped:
            part.has_stepped = False

    def _is_ours(self) -> bool:
        """Whether the optimizer's step is the trainer's, whose gradients are averaged."""
        is_ours = self._first is not None and self._first.is_ours
        return is_ours or self._is_stepping or self.trainer._update.is_stepping

    _is_stepping = False

    @contextmanager
    def _stepping(self) -> Iterator[None]:
        self._is_stepping = True
        try:
            if self._first is None:
                yield
            else:
                with self._first.ours():
                    yield
        finally:
            self._is_stepping = False

    def _used(self, name: str) -> None:
        if self._first is not None:
            self._first.used.add(name)

    def _stop_watching(self) -> None:
        if self._first is not None:
            self._first.close()
            self._first = None


class _OptimizerPart:
    """One optimizer and its progress within an update."""

    def __init__(self, optimizer: Optimizer, trainer: Any) -> None:
        from trainwright.engine.update import optimizer_calls

        config, scaler = trainer.config, trainer._grad_scaler
        self.optimizer = optimizer
        self._scaled_step = None if scaler is None else ScaledStep(scaler, optimizer)
        self._plain_step, _ = optimizer_calls(optimizer)
        is_main = optimizer is trainer.optimizer
        self.skip: SkipNonFinite | None = None
        clipper: Callable[[], Tensor] | None = gradient_clipper(optimizer, config.max_grad_norm)
        if config.non_finite == "skip":
            deferred: Any = None if scaler is None else _WithoutUpdate(scaler)
            self.skip = SkipNonFinite(optimizer, trainer.model.buffers(), grad_scaler=deferred)
            clipper = gradient_norm(optimizer, config.max_grad_norm)
        self._clip: Callable[[], Tensor | None] = clipper or _no_norm
        if is_main:
            self._clip = recorded_norm(clipper, is_scaled=scaler is not None)
        self.record_loss: Callable[[Tensor], None] = _ignore
        if self.skip is not None:  # all processes decide together
            self.record_loss = (SkipTogether(self.skip) if get_world_size() > 1 else self.skip).record_loss
        self.norm: Tensor | None = None
        self.is_ready = self.is_clipped = self.has_stepped = False

    def parameters(self) -> list[Tensor]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def begin(self) -> None:
        """Called before the first forward pass of an update."""
        if self.skip is not None:
            self.skip.begin()

    def clip(self, max_norm: float | None, norm_type: float) -> None:
        self.is_clipped = True
        if max_norm is None:
            self.norm = self._clip()
        else:
            self.norm = torch.nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type)

    def step(self) -> None:
        if self.skip is not None:
            recorded_step(self.skip)(self.norm)
        elif self._scaled_step is not None:
            self._scaled_step()
        else:
            self._plain_step()
        self.optimizer.zero_grad()
        self.norm, self.is_ready, self.is_clipped, self.has_stepped = None, False, False, True


class _WithoutUpdate:
    """A gradient scaler without ``update``, which is called elsewhere."""

    def __init__(self, grad_scaler: torch.amp.GradScaler) -> None:
        self._scaler = grad_scaler

    def step(self, optimizer: Optimizer) -> None:
        self._scaler.step(optimizer)

    def update(self) -> None:
        """The end of the trainer's update updates the scale."""


class _FirstWindow:
    """Detects in the first update what a user's step does without the trainer's methods."""

    def __init__(self, trainer: Any, own: list[str]) -> None:
        self._trainer, self._own = trainer, own
        self.used: set[str] = set()
        self.is_ours = self._has_raw_step = self._has_lost_gradients = self._lacks_gradients = False
        self._num_without_step = 0
        self._has_early_step = "run_step" in own  # a step within an accumulation window
        self._update = update = trainer._update
        self._calls = update.backward, update.finish
        self._handle = register_optimizer_step_pre_hook(self._see_step)

        def backward(loss: Tensor, batch: Any, call: Callable[[Tensor, Any], None] = update.backward) -> None:
            self.used.add("backward")
            call(loss, batch)

        def finish(call: Callable[[], None] = update.finish) -> None:
            self.used.add("step")
            self._lacks_gradients |= not self._has_gradients()
            with self.ours():
                call()

        update.backward, update.finish = backward, finish

    @contextmanager
    def ours(self) -> Iterator[None]:
        """Active while the trainer steps."""
        self.is_ours = True
        try:
            yield
        finally:
            self.is_ours = False

    def is_over(self) -> bool:
        """Whether weights have changed: a step may update them in some windows only."""
        return self._has_raw_step or "step" in self.used

    def see_gradients(self) -> None:
        """Check that the gradients of the window's earlier batches are still present."""
        state = self._trainer.state
        self._has_lost_gradients |= state.global_step > state.step_before + 1 and not self._has_gradients()

    def _has_gradients(self) -> bool:
        groups = self._update.groups.param_groups
        return any(parameter.grad is not None for group in groups for parameter in group["params"])

    def count_without_step(self) -> None:
        """Warn of a step that never steps an optimizer; some do so in some iterations only."""
        self._num_without_step += 1
        if self._num_without_step == _MANY_WITHOUT_STEP:
            logger.warning(
                "%s.%s has made no optimizer step in %d iterations: no parameter has changed. Call"
                " self.backward(loss) and self.step(optimizer).",
                self._trainer.__class__.__name__, " and ".join(self._own), _MANY_WITHOUT_STEP,
            )  # fmt: skip

    def warn(self) -> None:
        config = self._trainer.config
        if self._lacks_gradients and "backward" not in self.used:
            logger.warning(
                "%s.%s has left no gradient in the first update: no parameter changes. It must call"
                " self.backward(loss), also where it returns the loss.",
                self._trainer.__class__.__name__, " and ".join(self._own),
            )  # fmt: skip
            return
        if self._has_lost_gradients:
            logger.warning(
                "%s.%s sets gradients to None within an accumulation window (gradient_accumulation_steps=%d): only"
                " its last batch counts. Call self.zero_grad(optimizer), or nothing: self.step(optimizer) does it.",
                self._trainer.__class__.__name__, " and ".join(self._own), config.gradient_accumulation_steps,
            )  # fmt: skip
        without = {"backward", "step"} - self.used
        if self._has_raw_step:
            without.add("step")
        lost = []
        if config.gradient_accumulation_steps > 1 and ("backward" in without or self._has_early_step):
            lost.append(f"gradient_accumulation_steps={config.gradient_accumulation_steps}")
        if self._trainer._grad_scaler is not None and without:
            lost.append("the gradient scaler of mixed_precision='fp16'")
        if config.max_grad_norm is not None and "step" in without:
            lost.append(f"max_grad_norm={config.max_grad_norm}")
        if config.non_finite == "skip" and "step" in without:
            lost.append("non_finite='skip'")
        if not lost:
            return
        if config.gradient_accumulation_steps == 1 and self._trainer._grad_scaler is None:
            without.discard("backward")  # self.backward does the same then
        raw = {"backward": "loss.backward()", "step": "optimizer.step()"}
        instead = {"backward": "self.backward(loss)", "step": "self.step(optimizer)"}
        logger.warning(
            "%s.%s calls %s itself, so %s %s no effect. Call %s instead.",
            self._trainer.__class__.__name__,
            " and ".join(self._own),
            " and ".join(raw[name] for name in sorted(without)),
            ", ".join(lost),
            "has" if len(lost) == 1 else "have",
            " and ".join(instead[name] for name in sorted(without)),
        )

    def close(self) -> None:
        self._handle.remove()
        self._update.backward, self._update.finish = self._calls

    def _see_step(self, optimizer: Optimizer, *_: Any) -> None:
        if self.is_ours:
            return
        parameters = {id(parameter) for parameter in self._trainer.model.parameters()}
        # Not that of an optimizer of something else, such as the trial step of a fused optimizer.
        if any(id(p) in parameters for group in optimizer.param_groups for p in group["params"]):
            self._has_raw_step = True
            self._has_early_step |= not self._trainer._update.is_window_end


def _ignore(loss: Tensor) -> None:
    """Used if no update is skipped."""


def _no_norm() -> None:
    return None
