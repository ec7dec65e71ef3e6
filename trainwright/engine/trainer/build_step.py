"""What a step of the Python API consists of: its batches, its loss, its update and what it records."""

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from trainwright._torch_compat.tensor_chunks import is_dtensor
from trainwright.config.errors import ConfigTypeError
from trainwright.data.batches import Batches
from trainwright.data.collate import mixed
from trainwright.data.errors import add_batch_note
from trainwright.engine.accumulation import mean_outputs
from trainwright.engine.gradient_sync import explained
from trainwright.engine.label_alignment import predictions_of
from trainwright.engine.loss_fn import Contract, contract_for, fields_of
from trainwright.engine.pipeline_step import PipelineStep, pipeline_settings
from trainwright.engine.step import Step
from trainwright.engine.trainer import loaders, optim
from trainwright.engine.trainer.base import OWN_STEP_METHODS, STEP_METHODS
from trainwright.engine.trainer.processes import RankedTrainer, has_all_gpus
from trainwright.engine.update import Update, optimizer_calls
from trainwright.hooks.method_overrides import install, is_overridden, uninstall
from trainwright.lazy_names import ring
from trainwright.models.outputs import is_loss_alone, named_outputs, scalars_of

logger = logging.getLogger("trainwright.engine")

# No names of a model's outputs:
_SCORES = "prediction scores"
_LOSS = "loss of the step"


class SteppingTrainer(RankedTrainer):
    """Builds the step before the first one, and again for another optimizer or loss."""

    _watching: RemovableHandle | None = None

    def _build_loss(self) -> None:
        """Choose the loss of the model or the configuration."""
        self._contract = None
        self._loss_of_model = getattr(self.model, "compute_loss", None)
        self._criterion, self._own_loss = optim.losses(self.loss, self._loss_of_model, self.run.autocast)
        if self._step is not None:
            self._choose_step(self._step, self._update.batch)

    def _build_update(self) -> None:
        """Build the update from the configuration."""
        config, before = self.config, self._update if self._step is not None else None
        self._contract = None
        self._update = Update(
            self.optimizer,
            self.model,
            *optimizer_calls(self.optimizer, self.accelerator),
            accumulates=config.gradient_accumulation_steps > 1,
            max_norm=config.max_grad_norm,
            max_value=config.clip_grad_value,
            skip_non_finite=config.non_finite == "skip",
            grad_scaler=self.run.grad_scaler,
            **self._settings_of_update(),
        )
        if not any(is_overridden(self, name) for name in ("run_step", "train_step", "optimization_step")):
            self._update.check_closure()
        if self._update.closure is not None:
            self._update.closure.recompute = lambda batch: self.training_step(batch)
        if before is not None:
            self._update.continue_window(before)
        if self._step is not None:
            self._choose_step(self._step, self._update.batch)

    def _choose_step(self, step: Step, inputs: Any) -> None:
        """Choose what the step does with batches like ``inputs``: once for each optimizer and loss."""
        if inputs is None:  # before the first batch
            step.update, step.train = self._update, self._train_first
            return
        step.update, step.train = self._update, self.train_step if self._pipeline is None else self._train_outputs
        self._methods_of_step = self._assigned_methods()
        is_own = any(is_overridden(self, name) for name in STEP_METHODS)  # these compute the loss
        self._compute_loss = self.compute_loss if is_own else self._resolve_contract(inputs).compute_loss
        if self.config.graph:
            self._compile(step, inputs)

    def _compile(self, step: Step, inputs: Any) -> None:
        """Let ``step`` run programs in place of ``train_step``, or log why that is not possible."""
        graph = ring("graph.step")
        model, metrics = self.model, self._train_metrics
        is_own, names = is_overridden(self, "compute_loss"), None
        compute_loss: Any = self.compute_loss
        if not is_own:
            contract = contract_for(model, inputs, self._criterion, self._own_loss)
            names, compute_loss = fields_of(contract, self._own_loss), contract.compute_loss

        def losses_of(inputs: Any) -> tuple[Tensor, Mapping[str, Any]]:
            if is_own and metrics is None:
                return compute_loss(model, inputs), {}
            recording = _Recording(model)
            loss = compute_loss(recording, inputs)
            named = None if isinstance(recording.outputs, Tensor) else named_outputs(recording.outputs)
            wanted: dict[str, Any] = {} if named is None or len(named) == 1 else graph.copied_scalars(named)
            return loss, wanted if metrics is None else wanted | {_SCORES: predictions_of(recording.outputs)}

        def logs_of(loss: Tensor, outputs: dict[str, Any]) -> dict[str, Any]:
            if metrics is not None:
                metrics.record(outputs.pop(_SCORES, None))
            self._scalars = outputs or None
            return {"step_loss": loss}

        compiled = graph.CompiledStep(
            self.train_step,
            losses_of,
            logs_of,
            self._update,
            self.optimizer,
            accumulates=self.config.gradient_accumulation_steps > 1,
            after_backward=self._after_backward,
            backend="inductor",
            names=names,
            batch_size=graph.batch_size_of(self.train_dataloader),
            on_compiled=self.phases.count_compile,
        )
        refusal = graph.refusal_of_overrides(
            [name for name in OWN_STEP_METHODS if is_overridden(self, name)], type(self).__name__
        )
        if has_all_gpus(self.config.device_str):
            refusal = "one process splits its batches over several GPUs"
        compiled.use_in(step, refusal)

    def _after_backward(self, loss: Tensor) -> None:
        """The rest of a step whose program has computed the gradients."""
        if self._update.record_loss is not None:
            self._update.record_loss(loss)
        if self._update.is_window_end:
            self.optimization_step()

    def _train_outputs(self, model: Any, batch: Any) -> Mapping[str, Any]:
        """The part of a step after the forward pass, on the last stage of a pipeline."""
        loss = self.training_step(batch)
        return {"step_loss": loss}

    def _update_stages(self, kept: list[tuple[Any, Any]]) -> None:
        """The end of a window on all stages of a pipeline."""
        if self._update.record_loss is not None:
            self._update.record_loss(torch.stack([loss for loss, _ in kept]).sum())
        self._refuse_assigned_steps()  # by a callback
        self.optimization_step()

    def _settings_of_update(self) -> dict[str, Any]:
        """The arguments of :class:`Update` that depend on other processes and the Accelerator."""
        is_own = loaders.is_own_loader(self.train_dataloader)
        settings: dict[str, Any] = {"count": self._samples_of_step if is_own else None, "criterion": lambda: self.loss}
        if self._replica is not None:
            settings["replica"] = self._replica
            settings["count_all"] = self._samples_of_window if is_own else None
        if self.accelerator is not None:
            settings["differentiate"] = self._differentiate
        if self._pipeline is not None:
            settings |= pipeline_settings(self._pipeline, self.run.grad_scaler, self.optimizer)
        return settings

    def _differentiate(self, loss: Tensor, **options: Any) -> None:
        # The accelerator divides by this number itself; the shares of a window are weighted already.
        loss = loss * self.accelerator.gradient_accumulation_steps
        self.accelerator.backward(loss, **options)

    def _build_step(self) -> None:
        """Start the batches at the current step, and build the step, which chooses the rest with its first batch."""
        batches = self._batches_of_run()
        batches.prepare = self.prepare_input_batch
        mixup_func = getattr(self.train_dataloader, "mixup_func", None)
        if mixup_func is not None:
            batches.prepare = lambda batch: mixed(mixup_func, self.prepare_input_batch(batch))
        # An override may draw random numbers.
        batches.prefetches_to = None if is_overridden(self, "prepare_input_batch") else self.device
        batches.length = self.state.plan.steps_per_epoch
        batches.start(self.state.global_step)
        self._run_callbacks.is_fed = True
        self._prepare_own_update()
        kind: Callable[..., Step] = Step
        if self._pipeline is not None:
            kind = partial(
                PipelineStep,
                pipeline=self._pipeline,
                to_row=_row_of,
                from_row=_kept_of,
                loss_name=_LOSS,
                update_weights=self._update_stages,
            )
        step = kind(
            self._update,
            batches,
            self._step_model,
            self._train_first,
            begin_window=self._begin_window,
            end_window=self._put_metrics,
            phases=self.phases,
            keep=self._keep,
            begin_batch=self._begin_batch,
            end_batch=self._run_callbacks.end_batch,
            explain=explained(add_batch_note, self.model, "TrainingConfig.find_unused_parameters"),
        )
        step.after_batch = self._after_batch()  # all callbacks are registered now
        if isinstance(step, PipelineStep) and self._train_metrics is not None:
            step.after_output = self._train_metrics.add
        if any(is_overridden(self, name) for name in STEP_METHODS):
            if self._train_metrics is not None:
                self._train_metrics.watch(self.model)
            if self._update.is_weighed:
                self._watching = self._update.mean.watch(self.model)
        self._step = step

    def _train_first(self, model: Any, batch: Any) -> Any:
        """The ``train`` of a step before its first batch: chooses the others with it."""
        step = self._step
        assert step is not None, "it calls this"
        self._choose_step(step, batch)
        if any(is_overridden(self, name) for name in STEP_METHODS):
            self._check_first_results(step)
        return step.train(step.model, batch)

    def _batches_of_run(self) -> Batches:
        run = self.run
        if getattr(run, "batches", None) is None or run.batches.loader is not self.train_dataloader:
            run.batches = Batches(self.train_dataloader, may_change=self._may_change_data)
        return run.batches

    def _may_change_data(self) -> bool:
        """Whether code of the user's runs between two epochs, which may change the data."""
        own = ("before_step", "after_step", "inner_training_loop", "evaluate")
        parts = (*self._hooks, *self.callbacks)
        return any(getattr(part, "may_change_data", True) for part in parts) or any(
            is_overridden(self, name) for name in own
        )

    def loader_state(self) -> dict[str, Any] | None:
        # Before the first step a loader of torchdata would draw its order now.
        return self._batches_of_run().state() if self.state.global_step else None

    def load_loader_state(self, state: dict[str, Any]) -> None:
        self._batches_of_run().load_state(state)

    def _check_first_results(self, step: Step) -> None:
        """Check the first result of each override, because a wrong one causes an unclear error later."""
        if is_overridden(self, "train_step"):
            step.train = self._checked("train_step", _check_logs, partial(setattr, step, "train"))
        if is_overridden(self, "compute_loss"):
            self._compute_loss = self._checked("compute_loss", _check_loss, partial(setattr, self, "_compute_loss"))
        if is_overridden(self, "training_step"):
            checked = self._checked("training_step", _check_step, lambda method: uninstall(self, "training_step"))
            install(self, "training_step", checked)

    def _checked(self, name: str, check: Callable[[str, Any], None], use: Callable[[Any], object]) -> Any:
        """The method ``name``, whose first result is checked; ``use`` receives the method for the later calls."""
        method = getattr(self, name)

        def call(*arguments: Any) -> Any:
            use(method)
            result = method(*arguments)
            check(f"{type(self).__name__}.{name}", result)
            return result

        return call

    def _bind_run_step(self) -> tuple[Any, Callable[[], None]]:
        assert self._step is not None, "built before the first step"
        return self, self.run_step if is_overridden(self, "run_step") else self._step.run

    def _begin_window(self) -> int:
        """Called before the first batch of an update; returns the number of its batches."""
        state, step = self.state, self._step
        state.step_before = state.global_step
        if step is not None and self._assigned_methods() != self._methods_of_step:  # by a callback or hook
            self._choose_step(step, step.update.batch)
        return self.state.plan.steps(self.iter + 1) - state.global_step

    def _assigned_methods(self) -> tuple[Any, Any]:
        own = vars(self)
        return own.get("train_step"), own.get("compute_loss")

    def _begin_batch(self, batch: Any) -> None:
        """A batch was read: count and announce it before its step."""
        self._run_callbacks.begin_batch(batch)
        self.state.global_step += 1
        if self._update.needs_preparation and vars(self).get("optimization_step") is not self._prepared_update:
            self._prepare_own_update()  # assigned by a callback
        if self._replica is not None:
            self._replica.before_batch(is_last=self._update.is_window_end)
        if self.accelerator is not None:
            self.accelerator.sync_gradients = self._update.is_window_end

    def _prepare_own_update(self) -> None:
        """Let a user's ``optimization_step`` receive the gradients as they are before an update."""
        if is_overridden(self, "optimization_step") and self._update.needs_preparation:
            install(self, "optimization_step", partial(self._prepared, self.optimization_step))
        self._prepared_update = vars(self).get("optimization_step")

    def _prepared(self, optimization_step: Callable[[], None]) -> None:
        """Call a user's ``optimization_step`` with unscaled gradients, averaged over all processes."""
        self._update.prepare()
        optimization_step()
        self._update.release()

    def _resolve_contract(self, inputs: Any) -> Contract:
        if self._contract is None:
            recorders = (
                [self._update.record, self._train_metrics and self._train_metrics.record]
                if self._records_outputs
                else []
            )
            record_scalars = self._record_scalars if self._records_outputs else None
            self._contract = contract_for(
                self.model, inputs, self._criterion, self._own_loss, call_all(recorders), record_scalars
            )
        return self._contract

    def _samples_of_step(self, batch: Any) -> int:
        """This process's samples in the latest batch."""
        step = self.state.global_step - 1
        if self._replica is not None:
            return int(self.train_dataloader.batch_sampler.num_samples(step))
        return self.state.plan.samples(step + 1) - self.state.plan.samples(step)

    def _samples_of_window(self) -> int:
        """All processes' samples in the update that starts."""
        return self.state.plan.samples(self.state.plan.steps(self.iter + 1)) - self.state.plan.samples(
            self.state.global_step
        )

    def _is_padding_batch(self) -> bool:
        """Whether the latest batch is a padding batch, which only keeps this process in step with the others."""
        if not loaders.is_own_loader(self.train_dataloader):
            return False
        is_staged = self._pipeline is not None  # all batches of the update are counted before
        return (self._update.mean.latest_samples if is_staged else self._samples_of_step(None)) == 0

    def _record_scalars(self, outputs: Mapping[str, Any]) -> None:
        """Keep the scalars among the model's outputs for the current micro-batch; a program returns them itself."""
        if torch.compiler.is_compiling():
            return
        scalars = scalars_of(outputs)
        if self.config.gradient_accumulation_steps == 1 and is_loss_alone(scalars):
            return
        # Copies: the update may change them, if they are parameters.
        self._scalars = {k: v.detach().clone() if isinstance(v, Tensor) else v for k, v in scalars.items()}

    def _keep(self, step_logs: Mapping[str, Any]) -> tuple[Any, dict[str, Any] | None]:
        scalars, self._scalars = self._scalars, None
        return step_logs.get("step_loss"), scalars

    def _put_metrics(self, kept: list[tuple[Any, dict[str, Any] | None]], data_time: float) -> None:
        storage, update, losses, rows = self.storage, self._update, [], []
        storage.put_scalar("data_time", data_time)
        for loss, scalars in kept:
            if loss is not None:  # a train_step may return none
                losses.append(loss)
            if scalars:
                rows.append(scalars)
        if losses:
            update.put_mean(storage, "total_loss", losses)
        if rows:
            rows = [scalars or {} for _, scalars in kept]
            update.put_scalars(storage, mean_outputs(rows, update.mean.weights), update.weight)


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


def _row_of(kept: tuple[Any, dict[str, Any] | None]) -> dict[str, Any]:
    """What a step keeps of a micro-batch, by name."""
    loss, scalars = kept
    return {_LOSS: loss} | (scalars or {})


def _kept_of(row: dict[str, Any]) -> tuple[Any, dict[str, Any] | None]:
    """The reverse."""
    return row.pop(_LOSS), row or None


def call_all(recorders: list[Any]) -> Any:
    """One call that makes all calls that are not None; None if there are none."""
    there = [record for record in recorders if record is not None]
    if len(there) < 2:
        return there[0] if there else None

    def record_all(outputs: Any) -> None:
        for record in there:
            record(outputs)

    return record_all


def _check_loss(name: str, loss: Any) -> None:
    if not isinstance(loss, Tensor):
        raise ConfigTypeError(
            f"{name} returned {type(loss).__name__}; it must return the loss, a tensor of one number. Of several losses"
            " return the sum, and log each with get_event_storage().put_scalar(name, value)."
        )
    if is_dtensor(loss):
        raise ConfigTypeError(
            f"{name} returned a DTensor, of which each process may have a part only. Return loss.full_tensor()."
        )


def _check_step(name: str, result: Any) -> None:
    loss = result.get("loss") if isinstance(result, Mapping) else result
    if not isinstance(loss, Tensor | float | int):
        raise ConfigTypeError(
            f'{name} returned {type(result).__name__}; it must return its loss, or a dict with "loss" in it.'
        )


def _check_logs(name: str, logs: Any) -> None:
    if not isinstance(logs, Mapping):
        raise ConfigTypeError(f'{name} returned {type(logs).__name__}; it must return a dict with "step_loss" in it.')
