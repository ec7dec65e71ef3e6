"""Graph mode of the Python API: replaces ``train_step`` by one call."""

import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from trainwright._torch_compat.compile_graph import refusal_of_compiler
from trainwright.engine.compiled.capture import batch_size_of
from trainwright.engine.compiled.graph_trainer import (
    copied_scalars,
    outputs_of,
    put_metrics,
    refusal_of_run,
    usable_backend,
)
from trainwright.engine.compiled.update import CompiledUpdate, log_refusal
from trainwright.engine.label_alignment import predictions_of
from trainwright.engine.loss_fn import contract_for, fields_of
from trainwright.engine.step import Step
from trainwright.engine.trainer.base import TrainerShared
from trainwright.engine.trainer.processes import has_all_gpus
from trainwright.events.phases import activity
from trainwright.hooks.method_overrides import is_overridden
from trainwright.models.outputs import named_outputs

_STEP_METHODS = ("train_step", "training_step", "optimization_step", "run_step")
_SCORES = "prediction scores"  # no name of a model's output


def compile_steps(trainer: TrainerShared, step: Step) -> None:
    """Let ``step`` run programs in place of ``trainer.train_step``, or log why that is not possible."""
    own = [name for name in _STEP_METHODS if is_overridden(trainer, name)]
    config = trainer.config
    why = f"{type(trainer).__name__} has its own {' and '.join(own)}" if own else None
    if has_all_gpus(config.device_str):
        why = "one process splits its batches over several GPUs"
    adds, skips = config.gradient_accumulation_steps > 1, config.non_finite == "skip"
    why = why or refusal_of_run(trainer._grad_scaler, adds=adds, skips=skips)
    if why is not None:
        log_refusal(why)
        return
    step.train = CompiledSteps(trainer, step).train_step


class CompiledSteps:
    """Micro-batches of a trainer in graph mode, in place of its ``train_step``, which runs eager ones."""

    def __init__(self, trainer: TrainerShared, step: Step) -> None:
        self._trainer: Any = weakref.proxy(trainer)
        self._step: Any = weakref.proxy(step)
        self._model, self._criterion, self._own_loss = trainer.model, trainer._criterion, trainer._own_loss
        metrics, config = trainer._train_metrics, trainer.config
        self._record_scores = None if metrics is None else metrics.record  # the outputs of a batch
        self._adds, self._skips = config.gradient_accumulation_steps > 1, config.non_finite == "skip"
        self._update = step.update
        self._compiled: CompiledUpdate | None = None
        # A reference to the trainer, and so a reference cycle, only for an override.
        self._compute_loss = trainer.compute_loss if is_overridden(trainer, "compute_loss") else None
        self._batch_size = batch_size_of(trainer.train_dataloader)

    def train_step(self, model: Any, inputs: Any) -> dict[str, Any]:
        """One micro-batch, and the update at the end of its window."""
        if self._compiled is None:
            start = time.perf_counter()
            with activity("compile"):
                self._compiled = self._compiled_for(inputs)
            self._trainer.phases.count_compile(time.perf_counter() - start)  # imports the compiler
        trainer = self._trainer
        update = self._update
        mean = update.mean if self._adds else None
        results = self._compiled.run(inputs, is_last=update.is_window_end, mean=mean)
        if results is None:
            logs: dict[str, Any] = trainer.train_step(model, inputs)
            return logs
        put_metrics(results)
        outputs = outputs_of(results)
        scores = outputs.pop(_SCORES, None)
        if self._record_scores is not None:
            self._record_scores(scores)
        if outputs:
            trainer._scalars = outputs
        return {"step_loss": results["loss"]}

    def _compiled_for(self, inputs: Any) -> CompiledUpdate:
        names = None
        if self._compute_loss is None:
            contract = contract_for(self._model, inputs, self._criterion, self._own_loss)
            names = fields_of(contract, self._own_loss)
            loss_of = self._loss_of(contract.compute_loss)
        else:
            loss_of = self._loss_of(self._compute_loss)
        compiled = CompiledUpdate(
            loss_of,
            self._trainer.optimizer,
            backend=usable_backend("inductor", self._trainer.device),
            adds=self._adds,
            skips=self._skips,
            max_norm=self._trainer.config.max_grad_norm,
            max_value=self._trainer.config.clip_grad_value,
            names=names,
            batch_size=self._batch_size,
            on_refusal=self._use_eager_steps,
            on_compiled=lambda seconds: self._trainer.phases.count_compile(seconds),
        )
        why = refusal_of_compiler()
        if why is not None:
            compiled.refuse(why)
        return compiled

    def _loss_of(self, compute_loss: Callable[[Any, Any], Any]) -> Callable[[Any], tuple[Tensor, Mapping[str, Any]]]:
        model, needs_scores = self._model, self._record_scores is not None

        def loss_alone(inputs: Any) -> tuple[Tensor, Mapping[str, Any]]:
            return compute_loss(model, inputs), {}

        def loss_and_outputs(inputs: Any) -> tuple[Tensor, Mapping[str, Any]]:
            recording = _Recording(model)
            loss = compute_loss(recording, inputs)
            named = None if isinstance(recording.outputs, Tensor) else named_outputs(recording.outputs)
            wanted: dict[str, Any] = {} if named is None or len(named) == 1 else copied_scalars(named)
            if needs_scores:
                wanted[_SCORES] = predictions_of(recording.outputs)
            return loss, wanted

        return loss_alone if self._compute_loss is not None and not needs_scores else loss_and_outputs

    def _use_eager_steps(self) -> None:
        self._step.train = self._trainer.train_step


class _Recording:
    """The model with a record of its outputs; a new one for each capture."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.outputs: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.outputs = self.model(*args, **kwargs)
        return self.outputs

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)
