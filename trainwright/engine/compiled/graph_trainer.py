"""Graph mode of config files: a complete update as one compiled program."""

import logging
import shutil
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainwright._torch_compat.compile_graph import cpp_compilers, refusal_of_compiler
from trainwright.config.errors import ConfigError, did_you_mean
from trainwright.engine.accumulation import mean_outputs
from trainwright.engine.compiled.capture import batch_size_of
from trainwright.engine.compiled.update import CompiledUpdate
from trainwright.engine.default.eager_trainer import EagerTrainer
from trainwright.engine.loss_fn import losses_of, sum_losses
from trainwright.events.storage import get_event_storage, has_event_storage
from trainwright.hooks.method_overrides import is_overridden, overridable
from trainwright.models.outputs import scalars_of
from trainwright.parallel.dist import get_world_size

logger = logging.getLogger("trainwright.engine")

_STEP_METHODS = ("backward", "update")


class GraphBase(nn.Module):
    """A model and its optimizer, whose steps become programs of ``backend``.

    ``backend`` is a backend of ``torch.compile``: "inductor" (fast code; needs a C++ compiler on the CPU,
    without one it is "aot_eager"), "aot_eager" (single operations, no compiler). Dropout draws the same numbers as
    without a graph. Calling it calls the model; its state dict is the model's.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        backend: str = "inductor",
    ) -> None:
        super().__init__()
        # Without a compiler all steps are eager, so any name is accepted.
        is_usable = refusal_of_compiler() is None
        known = [*torch.compiler.list_backends(exclude_tags=()), "eager", "aot_eager"] if is_usable else [backend]
        if backend not in known:
            raise ConfigError(f"graph.backend: got {backend!r}. {did_you_mean(backend, known)}")
        self.model = model
        self.optimizer = optimizer
        self.backend = backend

    def forward(self, **batch: Any) -> Any:
        return self.model(**batch)


@overridable
class GraphTrainer(EagerTrainer):
    """Steps as programs: forward, backward, clipping and optimizer in one call.

    ``graph.model`` is the model, ``graph.optimizer`` its optimizer; ``settings`` are those of :class:`EagerTrainer`.
    The first update and shorter batches are eager. If a step cannot be a program, all steps are eager, and a warning
    gives the reason.
    """

    def __init__(
        self,
        graph: GraphBase,
        data_loader: Any,
        grad_acc_steps: int = 1,
        *,
        grad_scaler: torch.amp.GradScaler | None = None,
        skip_non_finite: bool = False,
        **settings: Any,
    ) -> None:
        if graph.optimizer is None:
            raise ConfigError("GraphTrainer: the graph has no optimizer; build it with GraphBase(model, optimizer).")
        settings |= {"grad_scaler": grad_scaler, "skip_non_finite": skip_non_finite}
        self.graph = graph
        self._results: Mapping[str, Any] | None = None  # of the latest program
        super().__init__(graph, data_loader, graph.optimizer, grad_acc_steps, **settings)
        self._compiled: CompiledUpdate | None = CompiledUpdate(
            self._losses_of,
            graph.optimizer,
            backend=usable_backend(graph.backend, self._device),
            adds=grad_acc_steps > 1,
            skips=skip_non_finite,
            batch_size=batch_size_of(data_loader),
            on_refusal=self._use_eager_steps,
            on_compiled=lambda seconds: self.phases.count_compile(seconds),
        )
        why = refusal_of_run(grad_scaler, adds=grad_acc_steps > 1, skips=skip_non_finite) or refusal_of_compiler()
        if why is not None:
            self._compiled.refuse(why)
        self.refuse_overrides()

    def refuse_overrides(self) -> None:
        """If the user overrides a part of the step, all steps are eager."""
        own = [name for name in _STEP_METHODS if is_overridden(self, name)]
        if own and self._compiled is not None:
            self._compiled.refuse(f"{type(self).__name__} has its own {' and '.join(own)}")

    def bind_step(
        self,
        get_batch: Callable[..., Any] | None = None,
        device: Any = None,
        train_step: Callable[[Any, Any], Mapping[str, Any]] | None = None,
    ) -> Callable[[], None]:
        """As in :class:`EagerTrainer`."""
        self.refuse_overrides()
        if train_step is not None and self._compiled is not None:
            self._compiled.refuse("the trainer has its own train_step")
        return super().bind_step(get_batch, device, train_step)

    @property
    def _called_model(self) -> nn.Module:
        return self.graph.model

    def _train_micro_batch(self, model: Any, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """A program, or eager where there is none for this batch; returns the logged outputs."""
        self._results = None
        if self._compiled is not None:
            update = self._update
            mean = update.mean if self.grad_acc_steps > 1 else None
            self._results = self._compiled.run(batch, is_last=update.is_window_end, mean=mean)
        return super()._train_micro_batch(model, batch) if self._results is None else outputs_of(self._results)

    def _end_window(self, outputs: list[Mapping[str, Any]], data_time: float) -> None:
        if self._results is None:
            super()._end_window(outputs, data_time)
        else:  # the program has stepped
            self.write_metrics(mean_outputs(outputs, self._update.mean.weights), data_time)
            put_metrics(self._results)

    def _losses_of(self, batch: Any) -> tuple[Tensor, Mapping[str, Any]]:
        """The outputs of a program: the loss, and the logged scalars."""
        outputs = self.graph.model(**batch)
        if not isinstance(outputs, dict):
            outputs = losses_of(outputs) or outputs
        return sum_losses(outputs), copied_scalars(outputs)

    def _use_eager_steps(self) -> None:
        self._compiled = None


def refusal_of_run(grad_scaler: torch.amp.GradScaler | None, *, adds: bool, skips: bool) -> str | None:
    """Why no step of this run can be a program; None if it can."""
    if get_world_size() > 1:
        return "several processes exchange gradients while the backward pass runs"
    if grad_scaler is not None:
        return "the gradient scaler of float16 decides on the host whether to step"
    if adds and skips:
        return "non_finite='skip' over several micro-batches keeps the values to restore outside of programs"
    return None


def usable_backend(backend: str, device: torch.device) -> str:
    """``backend``, or "aot_eager" in place of inductor on a CPU without a C++ compiler."""
    if backend != "inductor" or device.type != "cpu" or refusal_of_compiler() is not None:
        return backend
    if any(map(shutil.which, cpp_compilers())):
        return backend
    logger.info("Graph mode: no C++ compiler found for inductor; using the backend aot_eager.")
    return "aot_eager"


def outputs_of(results: Mapping[str, Any]) -> dict[str, Any]:
    """The model's outputs among the results of a program."""
    return {name[7:]: value for name, value in results.items() if name.startswith("output.")}


def copied_scalars(outputs: Mapping[str, Any]) -> dict[str, Any]:
    """Copies of the scalars: an output may be a parameter itself, with its value before the update."""
    return {k: v.clone() if isinstance(v, Tensor) else v for k, v in scalars_of(outputs).items()}


def put_metrics(results: Mapping[str, Any]) -> None:
    """Store ``grad_norm`` and ``skipped_update`` if the program computes them."""
    for name, is_noisy in (("grad_norm", True), ("skipped_update", False)):
        if name in results and has_event_storage():  # not in a user's own loop
            get_event_storage().put_scalar(name, results[name], smoothing_hint=is_noisy)
