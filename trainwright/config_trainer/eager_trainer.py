"""Steps in plain PyTorch, as config files describe them: a model that takes a batch's fields and returns its losses."""

import time
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainwright.base.batch import to_batch
from trainwright.base.dist import get_data_parallel_size
from trainwright.data.batches import Batches
from trainwright.data.sample_count import keeps_samples
from trainwright.data.sampler import CyclicSampler
from trainwright.engine.accumulation import TOKENS, mean_outputs
from trainwright.engine.gradient_sync import average_before_own_steps, explained, gradient_sync
from trainwright.engine.loop import TrainerBase
from trainwright.engine.loss_fn import explain_forward, sum_losses, warn_of_parts, without_empty_mean
from trainwright.engine.pipeline_step import PipelineStep, pipeline_settings, refuse_own_step
from trainwright.engine.sequence_parts import sequence_parts
from trainwright.engine.step import Step
from trainwright.engine.update import Update, in_turn, optimizer_calls
from trainwright.events.storage import get_event_storage
from trainwright.hooks.callbacks import RunCallbacks
from trainwright.hooks.method_overrides import is_overridden, overridable
from trainwright.models.eval_mode import set_training_mode
from trainwright.models.outputs import returned_losses, scalars_of, total_loss
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
    """

    _callbacks: RunCallbacks | None = None  # which see each batch

    def __init__(
        self,
        model: nn.Module,
        data_loader: Any,
        optimizer: torch.optim.Optimizer,
        grad_acc_steps: int = 1,
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
        self.grad_acc_steps = grad_acc_steps
        # Everything that depends on the configuration is decided here, not in the step.
        self._pipeline = pipeline_of(self._plain_model)
        stages = {} if self._pipeline is None else pipeline_settings(self._pipeline, grad_scaler, optimizer)
        self._replica = gradient_sync(
            self._plain_model,
            self._device,
            lambda wrapped: setattr(self, "model", wrapped),
            prepared=self._called_model if isinstance(self._called_model, DistributedDataParallel) else None,
            find_unused_parameters=find_unused_parameters,
            wraps=wraps_model,
        )
        sampler = getattr(data_loader, "batch_sampler", None)
        in_window = 0  # the samples of all processes; 0: unknown
        if isinstance(sampler, CyclicSampler) and keeps_samples(data_loader):
            in_window = sampler.micro_batch_size * get_data_parallel_size() * grad_acc_steps
        self._update = Update(
            optimizer,
            self._plain_model,
            *optimizer_calls(optimizer),
            accumulates=grad_acc_steps > 1,
            skip_non_finite=skip_non_finite,
            grad_scaler=grad_scaler,
            replica=self._replica,
            **stages,
            count=lambda batch: self.batches.count(batch),
            count_all=lambda: in_window,
            loss_ignores=loss_ignores,
        )
        if self._update.closure is not None:
            self._update.closure.recompute = lambda batch: self._train_micro_batch(self.model, batch)
        self._loss_of: Callable[[Any, Any], Tensor] = self._first_loss
        self._has_own_steps_averaged = False

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
            self._replica.before_batch(is_last=self._update.is_window_end)
            yield batch

    def run_step(
        self, get_batch: Callable[..., Mapping[str, Any]] | None = None, input_placement_device: Any = None
    ) -> None:
        """One update over ``grad_acc_steps`` micro-batches.

        ``get_batch(data, device)`` turns an item of the loader into the arguments of the model; by default
        :func:`trainwright.data.to_batch` on the model's device.
        """
        self.new_step(get_batch, input_placement_device).run()

    def backward(self, loss: Tensor) -> None:
        """Backward pass: add the gradients of ``loss``."""
        self._update.differentiate(loss)

    def update(self) -> None:
        """Clip the gradients, step the optimizer, and set the gradients to None."""
        self._update.finish()

    def write_metrics(self, loss_dict: Mapping[str, Any], data_time: float, prefix: str = "") -> None:
        """Store ``total_loss`` (the entry ``loss``, else the sum of those with "loss" in their names), each entry if
        there are several, and ``data_time``.

        Losses are means over the ranks, weighted by samples, or by tokens if ``loss_dict`` has ``num_tokens``; ranks
        exchange them once per log line. Does not synchronize with the device.
        """
        storage, update = get_event_storage(), self._update
        storage.put_scalar("data_time", data_time)
        scalars = scalars_of(loss_dict)
        total = total_loss(scalars)
        if update.record_loss is not None:
            update.record_loss(total)
        weight = scalars.get(TOKENS, 1 if self._replica is None else update.weight)
        if TOKENS in scalars:
            total = without_empty_mean(total, weight)
        update.put(storage, f"{prefix}total_loss", total, weight)
        if len(scalars) != 1 or "loss" not in next(iter(scalars)):  # a single loss is total_loss
            update.put_scalars(storage, scalars, weight, prefix)

    # Implementation.

    def new_step(self, get_batch: Any = None, device: Any = None, train_step: Any = None) -> Step:
        """The step, with the arguments of ``run_step``; it calls no method that may be overridden.

        ``train_step(model, batch)``: a step of the user's own, which also steps the optimizers at a window's end.
        """
        if train_step is None:
            self._update.check_closure()
        place = self._device if device is None else device
        self.batches.divide = sequence_parts(self._plain_model)
        self.batches.prepare = (
            partial(to_batch, device=place) if get_batch is None else lambda data: get_batch(data, place)
        )
        replica, callbacks = self._replica, self._callbacks

        def announce(_: Any) -> None:
            assert replica is not None, "only then it is called"
            replica.before_batch(is_last=self._update.is_window_end)

        kind: Callable[..., Step] = Step
        if self._pipeline is not None:
            refuse_own_step(self._pipeline, type(self).__name__, ["train_step"] if train_step is not None else [])
            kind = partial(
                PipelineStep,
                pipeline=self._pipeline,
                to_row=scalars_of,
                from_row=dict,
                logs_of=dict,
                loss_name="loss",
                shows_each=is_overridden(self, "write_metrics"),
            )
        return kind(
            self._update,
            self.batches,
            self.model,
            self._train_micro_batch if train_step is None else train_step,
            begin_window=lambda: self.grad_acc_steps,
            end_window=self._end_window if train_step is None else self._end_own_window,
            phases=self.phases,
            begin_batch=in_turn(
                [*([] if callbacks is None else [callbacks.begin_batch]), *([] if replica is None else [announce])]
            ),
            end_batch=None if callbacks is None else callbacks.end_batch,
            explain=explained(
                lambda error, batch: explain_forward(error, self._plain_model, batch),
                self._plain_model,
                "train.dist.find_unused_parameters",
            ),
        )

    def _bind_run_step(self) -> tuple[Any, Callable[[], None]]:
        return self, self.run_step if self.has_own_run_step() else self.new_step().run

    def has_own_run_step(self) -> bool:
        """Whether ``run_step`` is the user's. Gradients are averaged before each step that the user's code makes."""
        is_own = is_overridden(self, "run_step")
        refuse_own_step(self._pipeline, type(self).__name__, [n for n in _OWN_STEPS if is_overridden(self, n)])
        may_step = is_own or is_overridden(self, "update")
        if may_step and self._replica is not None and not self._has_own_steps_averaged:
            self._has_own_steps_averaged, update = True, self._update
            average_before_own_steps(
                self.optimizer, lambda: update.is_stepping, update.finish_window, lambda: update.sync
            )
        return is_own

    def _train_micro_batch(self, model: Any, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        outputs: Mapping[str, Any] = self.model(**batch)
        if type(outputs) is not dict:
            outputs = returned_losses(outputs)
        loss = self._loss_of(outputs, batch)
        start = time.perf_counter()
        self.backward(loss)
        self.phases.backward += time.perf_counter() - start
        return outputs

    def _first_loss(self, outputs: Any, batch: Any) -> Tensor:
        """The loss of the first micro-batch, which also chooses how the next ones get theirs."""
        self._loss_of = self._update.mean.loss_share if self._update.is_weighed else sum_losses
        loss = self._loss_of(outputs, batch)
        warn_of_parts(outputs)
        return loss

    def _end_window(self, outputs: list[Mapping[str, Any]], data_time: float) -> None:
        self._end_own_window(outputs, data_time)  # before the update: an output may be a parameter
        self.update()

    def _end_own_window(self, outputs: list[Mapping[str, Any]], data_time: float) -> None:
        self.write_metrics(mean_outputs(outputs, self._update.mean.weights), data_time)

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
