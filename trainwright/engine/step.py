"""One update of the weights: fetch, forward, loss, backward, and at the end of the window clip, step, zero_grad."""

import time
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from trainwright._torch_compat.fused_update import direct
from trainwright._torch_compat.run_backward import plain_backward
from trainwright.data.collate import to_batch
from trainwright.data.prefetch import ahead, cycle
from trainwright.engine.accumulation import AnnouncedWindow, WindowMean, average_over_ranks, mean_outputs
from trainwright.engine.extra_parameters import synchronized
from trainwright.engine.gradients import recorded_norm, recorded_step, scaled_backward, scaled_step, unscaled
from trainwright.engine.loop import TrainerBase
from trainwright.engine.loss_fn import explain_forward, sum_losses
from trainwright.events.storage import get_event_storage
from trainwright.hooks.overrides import overridable
from trainwright.optim.clip import gradient_clipper, gradient_norm
from trainwright.optim.skip import SkipNonFinite
from trainwright.parallel.data_parallel import accumulation_window, unwrap_model
from trainwright.parallel.dist import get_world_size


@overridable
class EagerTrainer(TrainerBase):
    """Steps in plain PyTorch.

    ``model`` is called with the fields of a batch and returns its losses by name; ``data_loader`` is restarted
    when it ends. Gradients are clipped by global norm if the optimizer's groups have ``clip_grad_max_norm`` and
    ``clip_grad_norm_type`` (as :func:`~trainwright.optim.get_default_optimizer_params` writes them). Their norm before
    clipping is stored as ``grad_norm``. ``skip_non_finite``: skip updates whose loss or gradients are not finite.

    The loss of an update is the mean over the samples of its micro-batches, or, if the model's outputs have
    ``num_tokens`` (the number of tokens that its losses average), the mean over the tokens of all ranks.

    To change the step, override ``run_step`` and use ``self.model``, ``self.optimizer``, ``self.grad_acc_steps``,
    ``next(self._data_loader_iter)``, ``self.write_metrics(loss_dict, data_time)`` and ``self.update()``.

    Attributes:
        reads_ahead: whether batches are copied to the accelerator during the previous step; False by default, since a
            user's ``get_batch`` may expect the loader's own batches.
    """

    reads_ahead = False

    def __init__(
        self,
        model: nn.Module,
        data_loader: Any,
        optimizer: torch.optim.Optimizer,
        grad_acc_steps: int = 1,
        *,
        grad_scaler: torch.amp.GradScaler | None = None,
        skip_non_finite: bool = False,
    ) -> None:
        super().__init__()
        model.train()
        self.model = model
        self.data_loader = data_loader
        self.optimizer = optimizer
        self.grad_acc_steps = grad_acc_steps
        # Everything that depends on the configuration is decided here, not in the step.
        self._window = accumulation_window(model, grad_acc_steps)
        self._mean = WindowMean(optimizer)
        self._loss_of: Callable[[Any, Any], Tensor] = sum_losses
        self._finish_gradients: Callable[[], None] = _nothing
        self._average_over_ranks = average_over_ranks if get_world_size() > 1 else _unchanged
        if grad_acc_steps > 1 or get_world_size() > 1:
            self._window = AnnouncedWindow(self._window, partial(self._mean.begin, grad_acc_steps))
            self._loss_of = self._mean.loss_share
            self._finish_gradients = self._mean.finish
        if get_world_size() > 1:
            self._finish_gradients = synchronized(model, optimizer, self._finish_gradients)
        self._build_update(grad_scaler, skip_non_finite=skip_non_finite)

    def _build_update(self, grad_scaler: torch.amp.GradScaler | None, *, skip_non_finite: bool) -> None:
        """Compose the calls of an update: backward, clipping and the optimizer's step."""
        optimizer, is_scaled = self.optimizer, grad_scaler is not None
        self._updater = updater = direct(optimizer)
        # Changes the weights; called with the norm of the gradients, if known.
        self._step_optimizer: Callable[[Any], object] = lambda norm: updater.step()
        self._grad_scaler = grad_scaler
        self._record_loss: Callable[[Any], object] = _nothing
        self._clip_gradients = recorded_norm(gradient_clipper(optimizer), is_scaled=is_scaled)
        self._differentiate: Callable[[Tensor], None] = plain_backward
        if grad_scaler is not None:
            self._differentiate = partial(scaled_backward, grad_scaler)
            self._finish_gradients = unscaled(grad_scaler, optimizer, self._finish_gradients)
            self._step_optimizer = scaled_step(grad_scaler, optimizer)
        if skip_non_finite:
            skip = SkipNonFinite(optimizer, self.model.buffers(), grad_scaler=grad_scaler)
            self._window = AnnouncedWindow(self._window, skip.begin)
            self._record_loss = skip.record_loss
            self._clip_gradients = recorded_norm(gradient_norm(optimizer), is_scaled=is_scaled)
            self._step_optimizer = recorded_step(skip)

    @cached_property
    def _data_loader_iter(self) -> Iterator[Any]:
        # Created on first use: a resume sets the loader's position before.
        batches = cycle(self.data_loader)
        return ahead(batches, self._device) if self.reads_ahead else batches

    def run_step(
        self, get_batch: Callable[..., Mapping[str, Any]] | None = None, input_placement_device: Any = None
    ) -> None:
        """One update over ``grad_acc_steps`` micro-batches.

        ``get_batch(data, device)`` turns an item of the loader into the arguments of the model; by default
        :func:`trainwright.data.to_batch` on the model's device.
        """
        get_batch = get_batch or to_batch
        device = self._device if input_placement_device is None else input_placement_device
        clock, phases = time.perf_counter, self.phases
        outputs: list[Mapping[str, Any]] = []
        data_time = 0.0
        for _ in self._window:
            start = clock()
            batch = get_batch(next(self._data_loader_iter), device)
            fetched = clock()
            data_time += fetched - start

            try:
                loss_dict = self.model(**batch)
                loss = self._loss_of(loss_dict, batch)
            except Exception as error:
                explain_forward(error, self._plain_model, batch)
                raise
            computed = clock()
            phases.forward += computed - fetched
            self.backward(loss)
            phases.backward += clock() - computed
            outputs.append(loss_dict)

        self.write_metrics(mean_outputs(outputs, self._mean.weights), data_time)
        start = clock()
        self.update()
        phases.optimizer += clock() - start
        phases.data += data_time

    def backward(self, loss: Tensor) -> None:
        """Backward pass: add the gradients of ``loss``."""
        self._differentiate(loss)

    def update(self) -> None:
        """Clip the gradients, step the optimizer, and set the gradients to None."""
        self._finish_gradients()
        self._step_optimizer(self._clip_gradients())
        self._updater.zero_grad()

    def write_metrics(self, loss_dict: Mapping[str, Any], data_time: float, prefix: str = "") -> None:
        """Store ``total_loss`` (the sum of entries named "loss"), each entry if there are several, and ``data_time``.

        Losses are means over the ranks, weighted by tokens if ``loss_dict`` has ``num_tokens``. Does not synchronize
        with the device.
        """
        storage = get_event_storage()
        storage.put_scalar("data_time", data_time)
        scalars = {
            name: value for name, value in loss_dict.items() if not isinstance(value, Tensor) or value.numel() == 1
        }
        scalars = self._average_over_ranks(scalars)
        losses = [value for name, value in scalars.items() if "loss" in name]
        total_loss = losses[0] if len(losses) == 1 else sum(losses)
        self._record_loss(total_loss)
        storage.put_scalar(f"{prefix}total_loss", total_loss)
        if len(scalars) > 1:
            for name, value in scalars.items():
                storage.put_scalar(prefix + name, value)

    @property
    def _plain_model(self) -> nn.Module:
        """The user's model, unwrapped."""
        return unwrap_model(self.model)

    @cached_property
    def _device(self) -> torch.device:
        parameter = next(iter(self.model.parameters()), None)
        return torch.device("cpu") if parameter is None else parameter.device


def _nothing(*_: object) -> None:
    """Does nothing."""


def _unchanged(scalars: dict[str, Any]) -> dict[str, Any]:
    return scalars
