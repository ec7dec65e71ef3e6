"""Steps in plain PyTorch, as config files describe them: a model that takes a batch's fields and returns its losses."""

import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainwright.base.dist import get_data_parallel_size
from trainwright.config.windows import Windows
from trainwright.data.batches import Batches
from trainwright.data.sample_count import keeps_samples
from trainwright.data.sampler import CyclicSampler
from trainwright.engine.gradient_sync import average_before_own_steps, gradient_sync
from trainwright.engine.loop import TrainerBase
from trainwright.engine.loss_fn import explain_forward, sum_losses, warn_of_parts
from trainwright.engine.pipeline_step import refuse_own_step
from trainwright.engine.step import Step
from trainwright.engine.step_builder import StepBuilder
from trainwright.engine.step_metrics import Row
from trainwright.events.storage import get_event_storage
from trainwright.hooks.callbacks import RunCallbacks
from trainwright.hooks.method_overrides import is_overridden, overridable
from trainwright.models.eval_mode import set_training_mode
from trainwright.models.outputs import returned_losses
from trainwright.models.targets import LossIgnores
from trainwright.parallel.data_parallel import unwrap_model
from trainwright.parallel.pipeline import pipeline_of

_OWN_STEPS = ("run_step", "update")  # the gradients of a pipeline stage are not those of the model


@overridable
class EagerTrainer(TrainerBase):
    """Steps in plain PyTorch.

    ``model`` is called with the fields of a batch and returns its losses by name; ``data_loader`` is restarted
    when it ends. Gradients are clipped by global norm if the optimizer's groups have ``clip_grad_max_norm`` and
    ``clip_grad_norm_type`` (as :func:`~trainwright.optim.get_default_optimizer_params` writes them). Their norm before
    clipping is stored as ``grad_norm``. ``skip_non_finite``: skip updates whose loss or gradients are not finite.

    The loss of an update is the mean over the targets of its micro-batches on all ranks: the ``num_tokens`` that the
    model returns, or what ``loss_ignores`` or its ``loss_type`` declares, or its labels that are integers and not -100,
    or its samples (:func:`~trainwright.models.targets.declared_targets`). With several ranks
    ``model`` is wrapped in torch's DistributedDataParallel (``wraps_model=False``: not wrapped, and gradients are
    averaged after the backward passes of an update); unused parameters are found in the first update
    (``find_unused_parameters``: some take part in some updates only).

    To change the step, override ``run_step`` and use ``self.model``, ``self.optimizer``, ``self.grad_acc_steps``,
    ``next(self._data_loader_iter)``, ``self.write_metrics(loss_dict, data_time)`` and ``self.update()``.

    Attributes:
        batches: the :class:`~trainwright.data.batches.Batches` of ``data_loader``.
        steps: builds the step, as for the other API; it has the update.
    """

    callbacks: RunCallbacks | None = None  # which see each batch
    _step: "weakref.ref[Step] | None" = None  # the latest one
    _own: tuple[Any, Step] | None = None  # that of run_step, and what it was built for

    def __init__(
        self,
        model: nn.Module,
        data_loader: Any,
        optimizer: torch.optim.Optimizer,
        grad_acc_steps: int | Mapping[int, int] = 1,
        *,
        grad_scaler: torch.amp.GradScaler | None = None,
        skip_non_finite: bool = False,
        find_unused_parameters: bool = False,
        wraps_model: bool = True,
        loss_ignores: LossIgnores = "declared",
    ) -> None:
        super().__init__()
        set_training_mode(model)
        self.model = model
        self.batches = Batches(data_loader)
        self.optimizer = optimizer
        self.windows = Windows.of(grad_acc_steps)
        self._pipeline = pipeline_of(self._plain_model)
        self._replica = gradient_sync(
            self._plain_model,
            self._device,
            lambda wrapped: setattr(self, "model", wrapped),
            prepared=self._called_model if isinstance(self._called_model, DistributedDataParallel) else None,
            find_unused_parameters=find_unused_parameters,
            wraps=wraps_model,
        )
        sampler = getattr(data_loader, "batch_sampler", None)
        in_batch = 0  # the samples of all processes; 0: unknown
        if isinstance(sampler, CyclicSampler) and keeps_samples(data_loader):
            in_batch = sampler.micro_batch_size * get_data_parallel_size()
        in_window = in_batch * self.grad_acc_steps
        self.steps = StepBuilder(
            self._plain_model,
            optimizer,
            lambda: self.batches,
            sync=self._replica,
            pipeline=self._pipeline,
            accumulates=self.windows.largest > 1,
            explain=lambda error, batch: explain_forward(error, self._plain_model, batch),
            find_unused_setting="train.dist.find_unused_parameters",
            recompute=lambda batch: self.train_micro_batch(self.model, batch),
            skip_non_finite=skip_non_finite,
            grad_scaler=grad_scaler,
            count_all=(lambda: in_batch * self.grad_acc_steps) if self.windows.is_scheduled else lambda: in_window,
            loss_ignores=loss_ignores,
        )
        self._loss_of: Callable[[Any], Tensor] = self._first_loss
        self._backward: Callable[[Tensor, Any], None] = self.steps.update.backward
        self._has_own_steps_averaged = False

    @property
    def model(self) -> nn.Module:
        """The model that a step calls, perhaps wrapped."""
        return self._model

    @model.setter
    def model(self, model: nn.Module) -> None:
        self._model = model
        if self._step is not None and (step := self._step()) is not None:
            step.model = model

    @property
    def grad_acc_steps(self) -> int:
        """The micro-batches of the current iteration."""
        return self.windows.at(self.iter)

    @grad_acc_steps.setter
    def grad_acc_steps(self, steps: int | Mapping[int, int]) -> None:
        self.windows = Windows.of(steps)

    @property
    def data_loader(self) -> Any:
        return self.batches.loader

    @data_loader.setter
    def data_loader(self, loader: Any) -> None:
        self.batches = Batches(loader, may_change=self.batches.may_change)

    @property
    def _data_loader_iter(self) -> Iterator[Any]:
        """The loader's batches, for a ``run_step`` of the user's own."""
        return self.batches if self._replica is None else self._announced()

    def _announced(self) -> Iterator[Any]:
        assert self._replica is not None
        for batch in self.batches:
            self._replica.before_batch(is_last=self.steps.update.is_window_end)
            yield batch

    def run_step(
        self, get_batch: Callable[..., Mapping[str, Any]] | None = None, input_placement_device: Any = None
    ) -> None:
        """One update over ``grad_acc_steps`` micro-batches.

        ``get_batch(data, device)`` turns an item of the loader into the arguments of the model; by default
        :func:`trainwright.data.to_batch` on the model's device.
        """
        wanted = get_batch, input_placement_device, self.batches, get_event_storage()
        if self._own is None or self._own[0] != wanted:
            self._own = wanted, self.new_step(get_batch, input_placement_device)
        self._own[1].run()

    def backward(self, loss: Tensor) -> None:
        """Backward pass: add the gradients of ``loss``."""
        self.steps.update.differentiate(loss)

    def update(self) -> None:
        """Clip the gradients, step the optimizer, and set the gradients to None."""
        self.steps.update.finish()

    def write_metrics(self, loss_dict: Mapping[str, Any], data_time: float, prefix: str = "") -> None:
        """Store ``total_loss`` (the entry ``loss``, else the sum of those with "loss" in their names), each entry if
        there are several, and ``data_time``.

        Losses are means over the ranks, weighted by samples, or by tokens if ``loss_dict`` has ``num_tokens``; ranks
        exchange them once per log line. Does not synchronize with the device.
        """
        metrics, update = self.steps.metrics, self.steps.update
        total = metrics.put_outputs(get_event_storage(), loss_dict, data_time, prefix)
        if total is not None and update.record_loss is not None:
            update.record_loss(total)

    # Implementation.

    def new_step(
        self, get_batch: Any = None, device: Any = None, train_step: Any = None, *, reads_ahead: bool = False
    ) -> Step:
        """The step, with the arguments of ``run_step``; it calls no method that may be overridden.

        ``train_step(model, batch)``: a step of the user's own, which also steps the optimizers at a window's end.
        ``reads_ahead``: see :meth:`StepBuilder.prepare_batches`.
        """
        steps, has_own_step, writes = self.steps, train_step is not None, is_overridden(self, "write_metrics")
        update, metrics = steps.update, steps.metrics
        if has_own_step:
            refuse_own_step(self._pipeline, type(self).__name__, ["train_step"])
        else:
            update.check_step()
        place = self._device if device is None else device
        own = None if get_batch is None else lambda data: get_batch(data, place)
        steps.prepare_batches(place, own, own_mixes=own is not None, reads_ahead=reads_ahead)
        self._backward = self._own_backward if is_overridden(self, "backward") else update.backward
        step = steps.build(
            self.model,
            train_step or self.train_micro_batch,
            finish=None if has_own_step else self.update if is_overridden(self, "update") else update.finish,
            length=(lambda: self.grad_acc_steps) if self.windows.is_scheduled else self.grad_acc_steps,
            keep=partial(metrics.of_outputs, keeps_all=writes) if has_own_step or writes else metrics.of_recorded,
            phases=self.phases,
            record=self._write_rows if writes else None,
            records_first=writes and not has_own_step,
            begin_batch=None if self.callbacks is None else self.callbacks.begin_batch,
            end_batch=None if self.callbacks is None else self.callbacks.end_batch,
        )
        self._step = weakref.ref(step)
        return step

    def _bind_run_step(self) -> tuple[Any, Callable[[], None]]:
        self.prepare_own_steps()
        return self, self.run_step if self.has_own_run_step() else self.new_step().run

    def has_own_run_step(self) -> bool:
        """Whether ``run_step`` is the user's."""
        return is_overridden(self, "run_step")

    def prepare_own_steps(self) -> None:
        """Before a training: average the gradients before each step that the user's code makes.

        Raises:
            ConfigError: there are pipeline stages, whose gradients it cannot use.
        """
        own = [name for name in _OWN_STEPS if is_overridden(self, name)]
        refuse_own_step(self._pipeline, type(self).__name__, own)
        if own and self._replica is not None and not self._has_own_steps_averaged:
            self._has_own_steps_averaged, update = True, self.steps.update
            average_before_own_steps(
                self.optimizer, lambda: update.is_stepping, update.finish_window, lambda: update.sync
            )

    def train_micro_batch(self, model: Any, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """Forward and backward of one micro-batch; returns the model's outputs by name."""
        outputs, steps = model(**batch), self.steps
        if type(outputs) is not dict:
            outputs = returned_losses(outputs)
        loss = self._loss_of(outputs)
        if steps.update.record is not None:
            steps.update.record(outputs)
        self._backward(loss, batch)
        steps.metrics.loss = loss.detach()
        if len(outputs) > 1:
            steps.metrics.record_scalars(outputs)
        return outputs  # type: ignore[no-any-return]  # the model's

    def _first_loss(self, outputs: Any) -> Tensor:
        self._loss_of = sum_losses
        loss = sum_losses(outputs)
        warn_of_parts(outputs)
        return loss

    def _own_backward(self, loss: Tensor, batch: Any) -> None:
        """The backward pass by the user's method."""
        start, update = time.perf_counter(), self.steps.update
        update.has_differentiated = True
        if update.is_weighed:
            loss = update.mean.share(loss, batch)
        if update.record_loss is not None:
            update.record_loss(loss)
        self.backward(loss)
        self.phases.backward += time.perf_counter() - start

    def _write_rows(self, rows: list[Row], data_time: float) -> None:
        self.write_metrics(self.steps.metrics.means(rows), data_time)

    @property
    def _called_model(self) -> nn.Module:
        """The model as the user passed it, perhaps wrapped."""
        return self.model

    @property
    def _plain_model(self) -> nn.Module:
        return unwrap_model(self._called_model)

    @cached_property
    def _device(self) -> torch.device:
        parameter = next(iter(self.model.parameters()), None)
        return torch.device("cpu") if parameter is None else parameter.device
