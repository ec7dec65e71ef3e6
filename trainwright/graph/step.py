"""Graph mode of both APIs: a step trains with compiled programs where possible, and eagerly otherwise.

A program is a complete micro-batch as one compiled function: forward, backward, and the update at a window's end. With
other optimizers than torch's, and with many parameters, it is forward and backward; the update follows eagerly.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from trainwright.engine.step import Step
from trainwright.engine.update import Update
from trainwright.events.storage import get_event_storage, has_event_storage
from trainwright.graph.capture import LossOf
from trainwright.graph.update import CompiledUpdate
from trainwright.hooks.method_overrides import is_overridden
from trainwright.models.outputs import scalars_of
from trainwright.parallel.dist import get_world_size


class CompiledStep:
    """In place of the ``train`` of a :class:`~trainwright.engine.step.Step`: a program, or ``eager`` without one.

    Args:
        eager: the ``train`` of batches that no program fits.
        losses_of: computes the loss of a batch and further outputs; called when a program is captured.
        logs_of: the logs of a micro-batch, from its loss and outputs.
        update: the update that eager steps use.
        accumulates: whether windows have more than one micro-batch.
        after_backward: called with the loss of a micro-batch whose program has computed the gradients only, because the
            step of the optimizer is not part of it; at a window's end it updates the weights. None: the caller does.
        settings: further arguments of :class:`~trainwright.graph.update.CompiledUpdate`.

    Attributes:
        has_stepped: whether a program that updates the weights at a window's end ran for the latest micro-batch.
    """

    def __init__(
        self,
        eager: Callable[[Any, Any], Any],
        losses_of: LossOf,
        logs_of: Callable[[Tensor, dict[str, Any]], Any],
        update: Update,
        optimizer: torch.optim.Optimizer,
        *,
        accumulates: bool,
        after_backward: Callable[[Tensor], None] | None = None,
        **settings: Any,
    ) -> None:
        self._after_backward = after_backward
        self._eager, self._logs_of, self._update = eager, logs_of, update
        self._mean = update.mean if accumulates else None
        self._compiled = CompiledUpdate(
            losses_of,
            optimizer,
            adds=accumulates,
            skips=update.skips,
            max_norm=update.max_norm,
            max_value=update.max_value,
            **settings,
        )
        self.has_stepped = False
        refusal = _refusal_of_run(update, accumulates)
        if refusal is not None:
            self._compiled.refuse(refusal)

    def use_in(self, step: Step, refusal: str | None) -> None:
        """Let ``step`` train with programs, unless there is a reason against it."""
        if refusal is not None:
            self._compiled.refuse(refusal)
        if not self._compiled.is_refused:
            step.train = self

    def __call__(self, model: Any, batch: Any) -> Any:
        """One micro-batch, and the update at the end of its window."""
        compiled, update = self._compiled, self._update
        results = None
        if not compiled.is_refused:
            results = compiled.run(batch, is_last=update.is_window_end, mean=self._mean)
        self.has_stepped = results is not None and compiled.has_stepped
        if results is None:
            return self._eager(model, batch)
        if not self.has_stepped and self._after_backward is not None:
            self._after_backward(results["loss"])
        for name, is_noisy in (("grad_norm", True), ("skipped_update", False)):
            if name in results and has_event_storage():  # not in a user's own loop
                get_event_storage().put_scalar(name, results[name], smoothing_hint=is_noisy)
        outputs = {name[7:]: value for name, value in results.items() if name.startswith("output.")}
        return self._logs_of(results["loss"], outputs)


def copied_scalars(outputs: Mapping[str, Any]) -> dict[str, Any]:
    """Copies of the scalars: an output may be a parameter, which the update changes."""
    return {k: v.clone() if isinstance(v, Tensor) else v for k, v in scalars_of(outputs).items()}


def batch_size_of(loader: Any) -> int | None:
    """The number of samples of a full batch of the loader; None if it is unknown."""
    for holder in (getattr(loader, "batch_sampler", None), loader):
        for name in ("micro_batch_size", "batch_size"):
            size = getattr(holder, name, None)
            if isinstance(size, int):
                return size
    return None


def refusal_of_overrides(owner: Any, methods: Iterable[str]) -> str | None:
    """The reason that some methods are the user's own, which a program would not call; None if none are."""
    own = [name for name in methods if is_overridden(owner, name)]
    return f"{type(owner).__name__} has its own {' and '.join(own)}" if own else None


def _refusal_of_run(update: Update, accumulates: bool) -> str | None:
    """The reason that no step of this run can be a program; None if there is none."""
    if get_world_size() > 1:
        return "several processes exchange gradients while the backward pass runs"
    if update.grad_scaler is not None:
        return "the gradient scaler of float16 decides on the host whether to step"
    if accumulates and update.skips:
        return "non_finite='skip' over several micro-batches keeps the values to restore outside of programs"
    return None
