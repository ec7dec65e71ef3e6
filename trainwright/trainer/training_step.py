"""What a step of the Python API consists of: its batches, its loss, its update and what it records."""

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import isfunction
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from trainwright._torch_compat.tensor_chunks import is_dtensor
from trainwright.base.batch import ReadFields
from trainwright.base.errors import ConfigError, ConfigTypeError
from trainwright.base.lazy_names import ring
from trainwright.data.sample_count import keeps_samples
from trainwright.engine import loaders
from trainwright.engine.loss_fn import Loss, LossSource, add_notes, contract_for, refused_batch, used_loss
from trainwright.engine.pipeline_step import refuse_own_step
from trainwright.engine.run import TrainerRun
from trainwright.engine.step import Step
from trainwright.engine.step_builder import StepBuilder
from trainwright.engine.step_plan import StepPlan
from trainwright.engine.update import Update, in_turn
from trainwright.hooks.callbacks import RunCallbacks
from trainwright.models.outputs import named_outputs, predictions_of
from trainwright.parallel.context import SHIFTED
from trainwright.trainer import optim
from trainwright.trainer.processes import OWN_STEPS, Placement, has_all_gpus
from trainwright.trainer.start import samples_of_epoch
from trainwright.trainer.train_metrics import TrainMetrics

logger = logging.getLogger("trainwright.engine")

# An override of one of these is a step of the user's own.
OWN_STEP_METHODS = ("run_step", "train_step", "training_step", "optimization_step")
# An override of one of these computes the loss itself.
STEP_METHODS = ("train_step", "training_step", "compute_loss")
_SCORES = "prediction scores"  # no name of a model's outputs
_ACCUMULATION = "gradient_accumulation_steps"
_ASSIGNED = ("train_step", "training_step", "optimization_step", "compute_loss")  # perhaps by a hook or callback


def _named(names: Sequence[str], values: Sequence[Any]) -> list[str]:
    """The names whose values are not None."""
    return [name for name, value in zip(names, values, strict=True) if value is not None]


class BatchLoss:
    """The mean loss of a batch, by the contract that the first batch chooses (``engine/loss_fn.py``).

    ``recorders``: called with the model's outputs before the loss is computed. ``source`` is part of checkpoints.
    """

    def __init__(
        self,
        model: nn.Module,
        criterion: Any,
        autocast: optim.Autocast | None,
        *,
        recorders: tuple[Callable[[Any], None] | None, ...] = (),
        record_scalars: Callable[[Mapping[str, Any]], None] | None = None,
        label_names: Sequence[str] | None = None,
        is_default: bool = False,
    ) -> None:
        self.of_model = getattr(model, "compute_loss", None)
        self.given = criterion
        self.criterion, self.own_loss = optim.losses(criterion, self.of_model, autocast)
        self._model, self._recorders, self._record_scalars = model, recorders, record_scalars
        self._label_names, self.source = label_names, LossSource(is_default=is_default)
        self._chosen: dict[bool, Loss] = {}  # of pairs, and of batches with names

    def chosen(self, inputs: Any) -> Loss:
        """``compute_loss`` for batches like ``inputs``, without a frame of this class."""
        has_names = isinstance(inputs, Mapping)
        if not isinstance(inputs, Mapping | tuple | list):  # also of evaluation data, where others were trained on
            raise refused_batch(inputs)
        if has_names not in self._chosen:  # data to evaluate may have names where those to train have none
            record = in_turn([one for one in self._recorders if one is not None])
            own_loss = used_loss(self.own_loss, inputs)
            if not self._chosen:
                self.own_loss = own_loss
            self._chosen[has_names], _ = contract_for(
                self._model, inputs, self.criterion, own_loss, record, self._record_scalars, self._label_names,
                self.source,
            )  # fmt: skip
        return self._chosen[has_names]

    def compute_loss(self, model: Any, inputs: Any) -> Any:
        return self.chosen(inputs)(model, inputs)


class TrainingStep:
    """Builds the step before the first one, and chooses it again for another optimizer or loss.

    Args:
        placement: what a step calls in place of the run's model.
        metrics: of the training batches. ``use_plan`` is called with the plan of a run whose epochs get another length.
            ``after_batch`` returns what to call after each.

    Attributes:
        builder: makes the step, as for the other API. ``update``, ``loss``: the current ones.
        step: during training.
    """

    builder: StepBuilder
    loss: BatchLoss

    def __init__(
        self,
        run: TrainerRun,
        placement: Placement,
        *,
        callbacks: RunCallbacks,
        metrics: TrainMetrics | None,
        use_plan: Callable[[StepPlan], None],
        accelerator: Any,
        after_batch: Callable[[], Any],
    ) -> None:
        self._run = weakref.proxy(run)
        self._overrides, self.model, self.placement, self._state = run.overrides, run.model, placement, run.state
        self._callbacks, self._metrics, self._accelerator = callbacks, metrics, accelerator
        self._use_plan = use_plan
        self._after_batch = after_batch
        self.step: Step | None = None
        self._watching: RemovableHandle | None = None
        self._may_be_assigned = _ASSIGNED if placement.pipeline is None else (*_ASSIGNED, *OWN_STEPS)
        self._chosen_with: tuple[Any, ...] = ()  # assigned methods
        self._window_end = 0  # the number of steps after the current update
        self._epoch_end = 0  # and after the current epoch
        divided = [one for one in ("compute_loss", "training_step") if run.overrides.divides_by(one, _ACCUMULATION)]
        for name in divided if run.spec.windows.largest > 1 else ():
            logger.warning(
                "%s.%s divides by %s: an update takes the mean over its micro-batches already. Return the loss of the"
                " batch as it is.", run.overrides.kind, name, _ACCUMULATION,
            )  # fmt: skip
        self._compute_loss: Callable[[Any, Any], Any] | None = None  # by the contract, or the user's
        self._training_step: Callable[[Any], Any] | None = None
        spec = run.spec
        self.builder = StepBuilder(
            self.model,
            run.optimizer,
            lambda: self._run.batches,
            sync=placement.sync,
            pipeline=placement.pipeline,
            accumulates=spec.windows.largest > 1,
            explain=partial(add_notes, model=self.model),
            find_unused_setting="TrainingConfig.find_unused_parameters",
            recompute=lambda batch: self._overrides.of("training_step", self.training_step)(batch),
            accelerator=accelerator,
            skip_non_finite=spec.non_finite == "skip",
            grad_scaler=run.grad_scaler,
            criterion=lambda: self._run.declared_criterion(self.loss.own_loss),
            label_names=spec.label_names,
            loss_ignores=run.spec.loss_ignores,
            count_all=lambda: self._samples_of_window() if self._is_planned else 0,
            differentiate=None if accelerator is None else self._differentiate,
            **self._changeable(),
        )
        self._use_update()

    @property
    def update(self) -> Update:
        return self.builder.update

    # Built before the first step, and again.

    def build_loss(self) -> None:
        """Choose the loss of the model or the configuration."""
        run, metrics = self._run, self._metrics
        self.loss = BatchLoss(
            self.model,
            run.criterion,
            run.autocast,
            recorders=(self.update.record, None if metrics is None else metrics.record),
            record_scalars=self.builder.metrics.record_scalars,
            label_names=run.spec.label_names,
            is_default=not run.spec.is_set("loss"),
        )
        self.update.mean.forget()
        if self.step is not None:
            self._choose(self.step, self.update.batch)

    def build_update(self) -> None:
        """Train with the current optimizer and settings of the run from now on."""
        self.builder.build_update(self._run.optimizer, **self._changeable())
        self._use_update()

    def _changeable(self) -> dict[str, Any]:
        """The settings of an update that may be changed between two trainings."""
        run, spec = self._run, self._run.spec
        steps_within = spec.lr_scheduling_steps is not None and spec.windows.largest > 1
        return {
            "max_norm": spec.max_grad_norm,
            "max_value": spec.clip_grad_value,
            "before_step": run.scheduling.step_within_window if steps_within else None,
        }

    def _use_update(self) -> None:
        run = self._run
        run.update = self.update
        self._has_own_loader = loaders.is_own_loader(run.batches.loader)
        self._is_planned = self._has_own_loader and keeps_samples(run.batches.loader)
        if not self._overrides.has("run_step", "train_step", "optimization_step"):
            self.update.check_step()
        self.build_loss()

    def check_assigned(self) -> None:
        run = self._run
        assigned = {"optimizer": (run.optimizer, "call set_optimizer(...)")}
        assigned["model"] = run.model, "build a Trainer of this model"
        self.builder.check_assigned("Trainer", assigned)
        if run.criterion is not self.loss.given:
            raise ConfigError("Trainer.loss was assigned, without effect on the steps: call set_loss(...).")

    def _differentiate(self, loss: Tensor, **options: Any) -> None:
        # The accelerator divides by this number itself; the shares of a window are weighted already.
        loss = loss * self._accelerator.gradient_accumulation_steps
        self._accelerator.backward(loss, **options)

    def start(self) -> None:
        """Start the batches at the current step, and build the step, which chooses the rest with its first batch."""
        run, overrides = self._run, self._overrides
        batches, builder, metrics = run.batches, self.builder, self.builder.metrics
        prepares = overrides.has("prepare_input_batch")
        builder.prepare_batches(run.device, run.trainer.prepare_input_batch if prepares else None)
        batches.length = self._state.plan.steps_per_epoch
        self._epoch_end = self._state.global_step  # the first step opens the epoch
        run.set_position()
        self._callbacks.is_fed = True
        # By the weights of the update; a step of the user's own may compute its gradients without them.
        self._is_counted = not overrides.has(*OWN_STEP_METHODS)
        if getattr(self.model, "compute_loss", None) != self.loss.of_model:
            self.build_loss()  # the model's compute_loss has been replaced
        step = builder.build(
            self.placement.model,
            self._train_first,
            finish=self.update.finish,
            length=self._begin_update if self._state.plan.windows.largest == 1 else self._begin_window,
            keep=metrics.of_logs,
            phases=run.trainer.phases,
            begin_batch=self._begin_batch,
            end_batch=self._callbacks.end_batch,
            after_output=None if self._metrics is None else self._metrics.add,
        )
        builder.use_after_batch(step, self._after_batch())  # all callbacks are registered now
        self.placement.on_wrap = partial(setattr, step, "model")
        if overrides.has(*STEP_METHODS):
            if self._metrics is not None:
                self._metrics.watch(self.model)
            if self.update.is_weighed:
                self._watching = self.update.mean.watch(self.model)
        self.step = step

    def close(self) -> None:
        """After the last step: nothing of the user's is kept."""
        self.step = self._compute_loss = self._training_step = self.update.batch = self.placement.on_wrap = None
        if self._watching is not None:
            self._watching.remove()

    def _train_first(self, model: Any, batch: Any) -> Any:
        """The ``train`` of a step before its first batch: chooses the others with it, and checks their results."""
        step, overrides = self.step, self._overrides
        assert step is not None, "it calls this"
        if batch is None:
            if overrides.has("prepare_input_batch"):
                raise ConfigTypeError(f"{overrides.kind}.prepare_input_batch returned None: is a return missing?")
            kind = type(self._run.batches.loader).__name__
            raise ConfigTypeError(f"{kind} gave None for a batch: is a return missing in its collate function?")
        self._choose(step, batch)
        is_own = self.loss.own_loss is not None or isfunction(self._run.criterion)
        if overrides.has("compute_loss") or (is_own and self.placement.pipeline is None):
            self._compute_loss = partial(self._first_loss, self._compute_loss)
        # A program from the first batch on: an eager step, also the first one after a resume, has other last bits.
        logs = (step.train if self._run.spec.graph else self._train_chosen)(model, batch)
        if overrides.has("train_step") and not isinstance(logs, Mapping):
            raise ConfigTypeError(
                f"{overrides.kind}.train_step returned {type(logs).__name__}; it must return a dict with the loss:"
                ' return {"step_loss": loss.detach()}.'
            )
        self._run.own_step.see_returned(logs)
        self._run.own_step.watch_returned(step)
        loss = logs.get("step_loss")
        if overrides.has("training_step") and not overrides.has("train_step") and not hasattr(loss, "__float__"):
            raise ConfigTypeError(
                f"{overrides.kind}.training_step returned {type(loss).__name__} as its loss; it must return the"
                ' loss, or a dict with "loss" in it.'
            )
        if "loss" in logs and loss is None:
            raise ConfigTypeError(
                f'{overrides.kind}.train_step returned {", ".join(map(repr, logs))}; the loss of a step is "step_loss".'
            )
        return logs

    def _first_loss(self, compute_loss: Any, model: Any, inputs: Any) -> Tensor:
        """The first loss of a method or a function of the user's, checked."""
        self._compute_loss, read = compute_loss, None
        is_own = self._overrides.has("compute_loss")
        if is_own and isinstance(inputs, dict) and SHIFTED in inputs:
            inputs = read = ReadFields(inputs)
        loss = compute_loss(model, inputs)
        if is_own or self.loss.own_loss is not None:
            name = f"{self._overrides.kind if is_own else type(self._run.model).__name__}.compute_loss"
        else:
            name = f"The loss function {self._run.criterion.__name__}"
        if not isinstance(loss, Tensor):
            log = "self.log({name: value})" if is_own else "get_event_storage().put_scalar(name, value)"
            hint = f"Of several losses return the sum, and log each with {log}."
            if hasattr(loss, "__float__"):  # NumPy's numbers and arrays, too
                hint = "Return it as computed, without .item(), float() or .numpy()."
            raise ConfigTypeError(
                f"{name} returned {type(loss).__name__}; it must return the loss, a tensor of one number. {hint}"
            )
        if read is not None and "labels" in read.names and SHIFTED not in read.names:
            raise ConfigError(
                f"{name} reads 'labels', not {SHIFTED!r}: with context_parallel_size > 1 a process has a part of every"
                " text, so that the label of a next token may be in the part of another process. Compare the scores of"
                f" all tokens with batch[{SHIFTED!r}], the labels of the tokens after each."
            )
        if is_own and is_dtensor(loss):
            raise ConfigTypeError(
                f"{name} returned a DTensor, of which each process may have a part only. Return loss.full_tensor()."
            )
        return loss

    def _choose(self, step: Step, inputs: Any) -> None:
        """Choose what the step does with batches like ``inputs``: once for each optimizer and loss."""
        step.use(self.update)
        if inputs is None:  # before the first batch
            self._use_train(step, self._train_first)
            return
        pipeline, overrides = self.placement.pipeline, self._overrides
        self._chosen_with = overrides.assigned(*self._may_be_assigned)
        refuse_own_step(pipeline, overrides.kind, _named(OWN_STEPS, overrides.assigned(*OWN_STEPS)))  # by a callback
        # A pipeline's gradients are complete after the backward passes of all stages.
        self.update.prepares_early = overrides.has("optimization_step") and pipeline is None
        self._training_step = overrides.of("training_step", self.training_step)
        is_own = overrides.has(*STEP_METHODS)  # these compute the loss
        loss = self.loss
        self._compute_loss = overrides.of("compute_loss", loss.compute_loss if is_own else loss.chosen(inputs))
        by_parts = pipeline is not None or overrides.has("training_step")
        self._use_train(step, overrides.of("train_step", self._train_by_parts if by_parts else self._train))
        # A user's train_step updates the weights, too.
        step.finish = None if overrides.has("train_step") else overrides.of("optimization_step", self.update.finish)
        if self._run.spec.graph:
            self._compile(step, inputs)

    def _use_train(self, step: Step, train: Callable[[Any, Any], Any]) -> None:
        self._train_chosen = train
        self.builder.use_train(step, train)

    def renew_after_batch(self) -> None:
        """During training: a callback was added."""
        if self.step is not None:
            self.builder.use_after_batch(self.step, self._after_batch())

    # The path of a batch: Step.run -> _train -> the contract's compute_loss -> the model; then Update.backward, finish.

    def _train(self, model: Any, inputs: Any) -> dict[str, Any]:
        """One micro-batch, if neither train_step nor training_step is the user's."""
        loss = self._compute_loss(model, inputs)  # type: ignore[misc]  # chosen before
        self.builder.update.backward(loss, inputs)
        return {"step_loss": loss.detach()}

    def _train_by_parts(self, model: Any, inputs: Any) -> dict[str, Any]:
        loss = (self._training_step or self._overrides.of("training_step", self.training_step))(inputs)
        return {"step_loss": loss.get("loss") if isinstance(loss, Mapping) else loss}

    def train_step(self, model: Any, inputs: Any) -> dict[str, Any]:
        logs = self._train_by_parts(model, inputs)
        if self.update.is_window_end:
            self._overrides.of("optimization_step", self.update.finish)()
        return logs

    def training_step(self, batch: Any) -> Tensor:
        compute_loss = self._compute_loss or self._overrides.of("compute_loss", self.loss.compute_loss)
        loss: Tensor = compute_loss(self.placement.model, batch)
        self.update.backward(loss, batch)
        return loss.detach()

    # Called by the step.

    def _begin_window(self) -> int:
        """Called before the first batch of an update; returns the number of its batches."""
        self._begin_update()
        self._window_end = self._state.plan.steps(self._run.trainer.iter + 1)
        return self._window_end - self._state.global_step

    def _begin_update(self) -> int:
        state, update = self._state, self.builder.update
        if state.global_step == self._epoch_end:
            self._open_epoch()
        state.step_before = state.global_step
        self._window_end = state.global_step + 1
        if update.batch is not None and self._overrides.assigned(*self._may_be_assigned) != self._chosen_with:
            assert self.step is not None, "it calls this"
            self._choose(self.step, update.batch)
        return 1

    def _open_epoch(self) -> None:
        """Ask for the length of the epoch that the next batch is in, and plan by it."""
        state, batches = self._state, self._run.batches
        batches.open()
        plan, done = state.plan, state.global_step
        epoch, start = plan.epoch_at(done)
        steps: int = batches.length
        samples = samples_of_epoch(batches.loader, steps, plan.batch_size)
        self._epoch_end = start + steps
        if (steps, samples) == (plan.steps_per_epoch, plan.samples_per_epoch):
            return
        if done != start:
            raise ConfigError(
                f"The run cannot be resumed: epoch {epoch + 1} had {plan.steps_per_epoch} batches"
                f" ({plan.samples_per_epoch or 'unknown'} samples), of which {done - start} were trained on, and has"
                f" {steps} ({samples or 'unknown'} samples) now. Use the same data, or start a new run with"
                " TrainingConfig.init_weights_from."
            )
        self._use_plan(plan.with_epoch(done, steps, samples))
        logger.info(
            "Epoch %d has %d batches (the epoch before: %d). The length of the run is now planned with %d updates, by"
            " which the configured schedule and the remaining time are computed (before: %d).",
            epoch + 1, steps, plan.steps_per_epoch, state.plan.num_updates, plan.num_updates,
        )  # fmt: skip

    def _begin_batch(self, batch: Any) -> None:
        """A batch was read: count and announce it before its step."""
        self._callbacks.begin_batch(batch)
        self._state.global_step += 1
        if self._accelerator is not None:
            self._accelerator.sync_gradients = self.update.is_window_end

    def _samples_of_window(self) -> int:
        plan = self._state.plan
        return plan.samples(self._window_end) - plan.samples(self._state.global_step)

    def is_padding_batch(self) -> bool:
        """Whether the latest batch is a padding batch, which only keeps this process in step with the others."""
        if self._is_counted:
            return self._has_own_loader and self.update.mean.latest_samples == 0
        return bool(self._run.batches.planned(self._state.global_step) == 0)

    # Graph mode.

    def _compile(self, step: Step, inputs: Any) -> None:
        """Let ``step`` run programs in place of ``train_step``, or log why that is not possible."""
        graph, run, spec = ring("graph.step"), self._run, self._run.spec
        model, metrics, loss_of_run = self.model, self._metrics, self.loss
        is_own, names = self._overrides.has("compute_loss"), None
        compute_loss = self._overrides.of("compute_loss", self.loss.compute_loss)
        if not is_own:
            compute_loss, names = contract_for(
                model, inputs, loss_of_run.criterion, loss_of_run.own_loss, label_names=spec.label_names
            )

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
            self.builder.metrics.scalars = outputs or None
            return {"step_loss": loss}

        compiled = graph.CompiledStep(
            self._train_chosen,
            losses_of,
            logs_of,
            self.update,
            run.optimizer,
            accumulates=spec.windows.largest > 1,
            backend=spec.graph_backend,
            names=names,
            batch_size=graph.batch_size_of(run.batches.loader),
            on_compiled=run.trainer.phases.count_compile,
        )
        own = [name for name in OWN_STEP_METHODS if self._overrides.has(name)]
        refusal = graph.refusal_of_overrides(own, self._overrides.kind)
        if has_all_gpus(spec.device_str):
            refusal = "one process splits its batches over several GPUs"
        compiled.use_in(step, refusal)


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
