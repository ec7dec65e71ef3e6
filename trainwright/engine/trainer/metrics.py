"""Metrics of the Python API: what a step measures, when it is written, and which callbacks receive it."""

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor

from trainwright.config.errors import ConfigTypeError
from trainwright.engine.trainer.base import TrainerShared
from trainwright.engine.trainer.train_metrics import TrainMetrics
from trainwright.engine.update import Update
from trainwright.hooks.overrides import install, is_overridden, uninstall
from trainwright.parallel.dist import all_gather_object, get_world_size

logger = logging.getLogger("trainwright.engine")


class MeasuredTrainer(TrainerShared):
    """Measures training."""

    _train_metrics: TrainMetrics | None
    _update: Update

    def _build_train_metrics(self) -> TrainMetrics | None:
        asks_for_none = not self.config.metrics and (self.config.metrics is not None or self.config.task is None)
        if self.config.eval_strategy == "eval_epoch" or asks_for_none:
            return None
        if "metrics_handler" in vars(self) and not hasattr(self.metrics_handler, "train_copy"):
            return None
        make_copy = lambda: self.metrics_handler.train_copy()  # noqa: E731  # built with the first batch
        is_epoch_end, compare = self.state.is_epoch_end, self._find_comparison_in_training
        return TrainMetrics(make_copy, self._metrics_are_due, is_epoch_end, compare, self._is_padding_batch)

    def _choose_after_batch(self) -> Any:
        """What to do with the logs of each micro-batch, as little as possible; None for nothing."""
        is_accumulating = self.config.gradient_accumulation_steps > 1
        # The storage has no values of single micro-batches; they are needed only if there are callbacks.
        needs_logs = is_overridden(self, "train_step") or (is_accumulating and len(self.callbacks) > 0)
        show = self._run_callbacks.record if needs_logs else None
        metrics = self._train_metrics
        if is_overridden(self, "compute_metric"):
            return self._call_compute_metric
        if is_overridden(self, "update_metrics"):
            return self._call_update_metrics
        if show is None:
            return None if metrics is None else metrics.add
        return partial(_show_and_add, show, _nothing if metrics is None else metrics.add)

    def _check_first_step(self) -> None:
        """Check the first result of a user's step, because a wrong one causes an unclear error later."""
        checks = {"compute_loss": _check_loss, "training_step": _check_step, "train_step": _check_logs}
        for name, check in checks.items():
            if is_overridden(self, name):
                install(self, name, partial(self._checked, name, check))

    def _checked(self, name: str, check: Any, *arguments: Any) -> Any:
        uninstall(self, name)  # later calls go directly to the method
        result = getattr(self, name)(*arguments)
        check(f"{type(self).__name__}.{name}", result)
        return result

    def _put_metrics(self, losses: list[Any], data_time: float) -> None:
        self.storage.put_scalar("data_time", data_time)
        losses = [loss for loss in losses if loss is not None]
        if losses:
            self._update.put_mean("total_loss", losses)

    def _call_update_metrics(self, step_logs: dict[str, Any], inputs: Any) -> None:
        """Call a user's ``update_metrics``."""
        loss, metric = self.update_metrics(self.model, inputs, step_logs.get("step_loss"))
        if self._train_metrics is not None:
            self._train_metrics.add(step_logs, inputs)  # does nothing if the batch is already counted
        self._run_callbacks.record({**step_logs, "epoch_loss": loss, "epoch_metric": metric})

    def _call_compute_metric(self, step_logs: dict[str, Any], inputs: Any) -> None:
        """Call a user's ``compute_metric``."""
        metric = self.compute_metric(self.model, inputs)
        self.set_train_mode()  # the user's method may have changed the mode
        self._run_callbacks.record({**step_logs, "epoch_metric": metric})

    def _log_is_due(self) -> bool:
        return self.state.has_passed(self._log_steps) if self._log_steps else self.state.is_epoch_end()

    def _metrics_are_due(self) -> bool:
        printed = self.config.print_steps if get_world_size() > 1 else None  # print the metrics of all processes
        return self._log_is_due() or (printed is not None and self.state.has_passed(printed))

    def _check_is_due(self) -> bool:
        """When values are checked, and computed over all processes: before anything reads them."""
        return self._log_is_due() or (get_world_size() > 1 and (self._metrics_are_due() or self.state.is_epoch_end()))

    def _mean_epoch_loss(self) -> float:
        """Mean loss of this epoch over all processes, equal on each of them."""
        losses = all_gather_object(self._run_callbacks.epoch_loss())
        return float(sum(losses) / len(losses))

    def _latest(self, name: str) -> float | None:
        value, _ = self.storage.latest().get(name, (None, 0))
        return value


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
            f"{name} returned {type(loss).__name__}; it must return the loss, a tensor of one number."
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


def _show_and_add(show: Any, add: Any, step_logs: dict[str, Any], inputs: Any) -> None:
    show(step_logs)
    add(step_logs, inputs)


def _nothing(step_logs: dict[str, Any], inputs: Any) -> None:
    """Used if nothing reads the logs of a step."""
