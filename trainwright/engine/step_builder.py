"""Builds the step of either API: its update, what it records, and how its batches are prepared."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from trainwright.base.batch import to_batch
from trainwright.base.errors import ConfigError
from trainwright.data.batches import Batches
from trainwright.data.collate import mixed
from trainwright.engine.gradient_sync import GradientSync, explained
from trainwright.engine.pipeline_step import TrainStages, pipeline_settings
from trainwright.engine.sequence_parts import sequence_parts
from trainwright.engine.step import Step
from trainwright.engine.step_metrics import StepLog, StepMetrics
from trainwright.engine.update import Update, optimizer_calls
from trainwright.events.phases import PhaseTimes
from trainwright.events.storage import EventStorage, get_event_storage
from trainwright.parallel.pipeline import Pipeline


class StepBuilder:
    """The parts of a step that are the same in both APIs, and the step made of them.

    Args:
        model: not wrapped.
        batches: returns those of the training.
        sync: averages the gradients of several processes; ``pipeline``: runs the stages of the model.
        accumulates: whether windows have more than one micro-batch.
        explain: called with an error of a step and the batch, to add what the user needs to know.
        find_unused_setting: the name of ``find_unused_parameters`` in messages.
        recompute: forward and backward pass of a batch, for an optimizer that takes a closure.
        accelerator: makes the step of the optimizer.
        settings: further arguments of each :class:`~trainwright.engine.update.Update`.

    Attributes:
        update, metrics: the current ones.
        optimizer: that of the update.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        batches: Callable[[], Batches],
        *,
        sync: GradientSync | None,
        pipeline: Pipeline | None,
        accumulates: bool,
        explain: Callable[[Exception, Any], None],
        find_unused_setting: str,
        recompute: Callable[[Any], object],
        accelerator: Any = None,
        **settings: Any,
    ) -> None:
        self.model, self.optimizer, self._batches, self._pipeline = model, optimizer, batches, pipeline
        self._explain = explained(explain, model, find_unused_setting)
        self._recompute, self._accelerator = recompute, accelerator
        self._stages: TrainStages | None = None
        self._settings: dict[str, Any] = {
            "replica": sync,
            "accumulates": accumulates,
            "count": lambda batch: batches().count(batch),
            **settings,
        }
        self.update = self._new_update(optimizer)
        self.metrics = StepMetrics(self.update.mean, self.update.device, accumulates=accumulates)

    def build_update(self, optimizer: Optimizer, **settings: Any) -> None:
        """Update by ``optimizer`` and with other settings from now on; a window that has begun continues."""
        before, self.optimizer = self.update, optimizer
        self._settings |= settings
        self.update = self._new_update(optimizer, mean=before.mean)
        self.update.continue_window(before)

    def _new_update(self, optimizer: Optimizer, **settings: Any) -> Update:
        if self._pipeline is not None:
            settings |= pipeline_settings(self._pipeline, self._settings["grad_scaler"], optimizer)
        calls = optimizer_calls(optimizer, self._accelerator)
        update = Update(optimizer, self.model, *calls, **{**self._settings, **settings})
        if update.closure is not None:
            update.closure.recompute = self._recompute
        return update

    def check_assigned(self, kind: str, assigned: Mapping[str, tuple[Any, str]]) -> None:
        """Raise if ``model`` or ``optimizer`` were assigned to a trainer, whose step has the ones before.

        ``assigned``: those of the trainer by name, each with what to do instead.
        """
        for name, (now, instead) in assigned.items():
            if now is not getattr(self, name):
                raise ConfigError(f"{kind}.{name} was assigned, without effect on the steps: {instead}.")

    def prepare_batches(
        self,
        device: torch.device,
        own: Callable[[Any], Any] | None = None,
        *,
        own_mixes: bool = False,
        reads_ahead: bool = True,
    ) -> None:
        """Choose what the training's batches become: moved to the device, or what a method of the user's returns.

        Args:
            own: that method, which gets batches as the loader gives them, and when the step needs them.
            own_mixes: it also applies the loader's ``mixup_func``.
            reads_ahead: without ``own``, each batch is read and copied while the previous step computes.
        """
        batches, prepare = self._batches(), own or partial(to_batch, device=device)
        batches.prefetches_to = device if reads_ahead and own is None else None
        mixup_func = None if own_mixes else getattr(batches.loader, "mixup_func", None)
        batches.prepare = prepare if mixup_func is None else lambda batch: mixed(mixup_func, prepare(batch))
        batches.divide = sequence_parts(self.model)
        if not batches.can_read_again:
            self.update.count_targets()

    def build(
        self,
        called: Any,
        train: Callable[[Any, Any], Any],
        *,
        finish: Callable[[], object] | None,
        length: int | Callable[[], int],
        keep: Callable[[Any], Any],
        phases: PhaseTimes,
        record: Callable[[list[Any], float], object] | None = None,
        records_first: bool = False,
        begin_batch: Callable[[Any], None] | None = None,
        end_batch: Callable[[], None] | None = None,
        after_output: Callable[[Any, Any], None] | None = None,
    ) -> Step:
        """The step within a training, with the arguments of :class:`~trainwright.engine.step.Step`.

        ``called``: the model, perhaps wrapped. ``record``: what is called with the rows of an update in place of
        :class:`~trainwright.engine.step_metrics.StepMetrics`. Stages call ``after_output`` as
        :class:`~trainwright.engine.pipeline_step.TrainStages` says.
        """
        storage = get_event_storage()
        put: Callable[[list[Any], float], object] = record or partial(self.metrics.put, storage)
        options: dict[str, Any] = {"keep": keep, "record": put, "end_batch": end_batch}
        log_on_stage: dict[str, Any] = {}
        if self._pipeline is not None:
            stages = self._stages = TrainStages(
                self._pipeline,
                lambda: self.update,
                train,
                keep,
                after_output=after_output,
                needs_rows=record is not None,
            )
            train = stages
            # They end batches themselves, and have the rows of a window after it.
            options = {"keep": lambda _: None, "record": partial(self._record_of_stages, put, stages, storage)}
            log_on_stage = {"log_on_stage": stages.log}
        step = Step(
            self.update,
            self._batches(),
            called,
            train,
            finish=finish,
            length=length,
            phases=phases,
            records_first=records_first,
            begin_batch=begin_batch,
            explain=self._explain,
            **options,
        )
        step.new_log = partial(StepLog, self.metrics, storage, **log_on_stage)
        return step

    def _record_of_stages(
        self,
        put: Callable[[list[Any], float], object],
        stages: TrainStages,
        storage: EventStorage,
        _: list[Any],
        data_time: float,
    ) -> None:
        put(stages.rows, data_time)
        stages.put_logged(self.metrics, storage)

    def use_train(self, step: Step, train: Callable[[Any, Any], Any]) -> None:
        """Train each micro-batch with ``train`` from now on."""
        if self._stages is None:
            step.train = train
        else:
            self._stages.train = train

    def use_after_batch(self, step: Step, call: Callable[[Any, Any], None] | None) -> None:
        """Call this with the logs and the batch of each micro-batch from now on; None: nothing."""
        if self._stages is None:
            step.after_batch = call
        else:
            self._stages.after_batch = call
