"""What a step of either API records of each update: the loss, its parts, and the time of waiting for batches."""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainwright._torch_compat.tensor_chunks import is_dtensor
from trainwright.base.devices import wide_dtype
from trainwright.base.dist import get_averaging_size
from trainwright.base.errors import ConfigTypeError
from trainwright.engine.accumulation import TOKENS, WindowMean, mean_outputs, part_of_mean, weighted_mean
from trainwright.engine.loss_fn import without_empty_mean
from trainwright.events.storage import OWN_NAMES, EventStorage
from trainwright.models.outputs import is_loss_alone, scalars_of, total_loss

# What is recorded of a micro-batch: its mean loss, and the scalars that the model returned; None: no others.
Row = tuple[Any, Mapping[str, Any] | None]


class StepMetrics:
    """Stores ``data_time``, ``total_loss`` and what a model returns beside a single loss, once for each update.

    Values are means over the micro-batches of the update and over all processes, weighted as the loss is. Other
    processes take part at the next log line (``EventStorage.reduce``). Nothing synchronizes with the device.

    Args:
        mean: knows what the micro-batches of the current window weigh.
        device: of the means over several processes; None: there is one process.
        accumulates: whether windows have more than one micro-batch.

    Attributes:
        loss, scalars: those that were recorded for the current micro-batch.
    """

    def __init__(self, mean: WindowMean, device: torch.device | None, *, accumulates: bool) -> None:
        self.loss: Tensor | None = None
        self.scalars: Mapping[str, Any] | None = None
        self._mean, self._device, self._accumulates = mean, device, accumulates

    # Of a micro-batch.

    def record_scalars(self, outputs: Mapping[str, Any]) -> None:
        """Record the scalars among the model's outputs; a compiled program returns them itself."""
        if torch.compiler.is_compiling():
            return
        scalars = scalars_of(outputs)
        if self._accumulates or not is_loss_alone(scalars):  # which rows have already
            self.scalars = _copies(scalars)

    def of_logs(self, logs: Mapping[str, Any]) -> Row:
        """The row of logs with ``step_loss``, and of the recorded scalars."""
        scalars, self.scalars = self.scalars, None
        return logs.get("step_loss"), scalars

    def of_recorded(self, logs: Any) -> Row:
        """The row of the recorded loss and scalars."""
        loss, scalars, self.scalars = self.loss, self.scalars, None
        return loss, scalars

    def of_outputs(self, outputs: Mapping[str, Any], *, keeps_all: bool = False) -> Row:
        """The row of outputs of a model, or of a user's step, by name; a loss is one with "loss" in its name.

        ``keeps_all``: the row has all outputs, for a method of the user's.
        """
        if not isinstance(outputs, Mapping):
            raise ConfigTypeError(
                f"train_step returned {type(outputs).__name__}; it must return a dict of what is logged, with its"
                ' losses, for example {"loss": loss}.'
            )
        scalars = scalars_of(outputs)
        loss = total_loss(scalars)
        if TOKENS in scalars and loss is not None:
            loss = without_empty_mean(loss, scalars[TOKENS])
        kept: dict[str, Any] | None = None
        if keeps_all or self._accumulates or not is_loss_alone(scalars):
            kept = {**outputs, **_copies(scalars)} if keeps_all else _copies(scalars)
        return loss.detach() if isinstance(loss, Tensor) else loss, kept

    # Of an update.

    def put(self, storage: EventStorage, rows: Sequence[Row], data_time: float) -> None:
        """Store the means of the rows of an update, and the seconds of waiting for its batches."""
        storage.put_scalar("data_time", data_time)
        losses, has_scalars = list[Any](), False
        for loss, scalars in rows:
            has_scalars |= bool(scalars)
            if loss is not None:  # a train_step may return none
                losses.append(loss)
        if losses:
            self._put_loss(storage, losses)
        if has_scalars:
            self._put_scalars(storage, self.means(rows), self._weight())

    def put_logged(
        self, storage: EventStorage, rows: Sequence[Mapping[str, Any]], where: str = "a micro-batch"
    ) -> None:
        """Store the means of values that the user's code has logged in the micro-batches of an update.

        ``where`` they were logged, for errors.
        """
        weights, device = self._mean.weights, self._device
        names = [*dict.fromkeys(chain.from_iterable(rows))]
        storage.admit_logged(names, where)
        for name in names:
            having = [place for place, row in enumerate(rows) if name in row]
            by = [weights[place] for place in having] if len(weights) == len(rows) else []
            values = [rows[place][name] for place in having]
            if by and isinstance(by[0], Tensor):
                values = [as_tensor(value, by[0].device) for value in values]
            if device is None:
                storage.put_scalar(name, weighted_mean(values, by))
            else:
                part = part_of_mean([as_tensor(value, device) for value in values], by, device)
                storage.put_mean(name, part, dist.all_reduce, is_optional=True)

    def put_nothing_logged(self, storage: EventStorage, names: Sequence[str], where: str) -> None:
        """Store that other processes have logged values of these names: this one has no part of their means."""
        assert self._device is not None, "there are others"
        storage.admit_logged(names, where)
        for name in names:
            no_part = torch.zeros((), device=self._device), 0.0
            storage.put_mean(name, no_part, dist.all_reduce, is_optional=True)

    def put_outputs(self, storage: EventStorage, outputs: Mapping[str, Any], data_time: float, prefix: str) -> Any:
        """Store outputs that are means of an update already; returns their total loss."""
        storage.put_scalar("data_time", data_time)
        scalars = scalars_of(outputs)
        total = total_loss(scalars)
        weight = scalars.get(TOKENS, self._weight())
        if TOKENS in scalars and total is not None:
            total = without_empty_mean(total, weight)
        if total is not None:
            self._put(storage, f"{prefix}total_loss", total, weight)
        self._put_scalars(storage, scalars, weight, prefix)
        return total

    def means(self, rows: Sequence[Row]) -> dict[str, Any]:
        """The scalars of an update by name: means over its micro-batches."""
        return mean_outputs([scalars or {} for _, scalars in rows], self._mean.weights)

    def _put_loss(self, storage: EventStorage, losses: Sequence[Any]) -> None:
        weights, device = self._mean.weights, self._device
        if device is not None:
            storage.put_mean("total_loss", part_of_mean(losses, weights, device), dist.all_reduce)
        else:
            is_single = len(losses) == 1 and not weights
            storage.put_scalar("total_loss", losses[0] if is_single else weighted_mean(losses, weights))

    def _put_scalars(self, storage: EventStorage, scalars: Mapping[str, Any], weight: Any, prefix: str = "") -> None:
        """Store means of this process. A single loss is not stored again: it is ``total_loss``.

        A name of the trainer's own metrics gets the prefix ``model/``.
        """
        if is_loss_alone(scalars):
            return
        for name, value in scalars.items():
            if name == TOKENS and self._device is not None:  # the sum of all processes' values
                # What a padding batch has does not count.
                value = self._weight() if self._mean.is_by_tokens and self._mean.weights else value
                value = value.full_tensor() if is_dtensor(value) else value
                value = torch.as_tensor(value, device=self._device).detach().reshape(())
                part = [value, torch.ones_like(value) / get_averaging_size()]
                storage.put_mean(prefix + name, torch.stack(part).to(wide_dtype(self._device)), dist.all_reduce)
            else:
                self._put(storage, prefix + (f"model/{name}" if name in OWN_NAMES else name), value, weight)

    def _put(self, storage: EventStorage, name: str, mean: Any, weight: Any) -> None:
        """Store this process's mean, weighted by ``weight`` in the mean over all processes."""
        if self._device is None:
            storage.put_scalar(name, mean)
        else:
            mean = as_tensor(mean, self._device)
            storage.put_mean(name, part_of_mean([mean], [weight], self._device), dist.all_reduce)

    def _weight(self) -> Any:
        """The samples or tokens of this window; 1 if they are not counted."""
        weights = self._mean.weights
        if not weights or self._device is None:
            return 1
        return torch.stack([*weights]).sum() if isinstance(weights[0], Tensor) else sum(weights)


class StepLog:
    """The values that the user's code logs in the micro-batches of an update, beside what its step records.

    Of several values of a name in one micro-batch the latest counts.

    Args:
        log_on_stage: logs values while a pipeline stage computes a loss; returns False outside of that.
    """

    def __init__(
        self,
        metrics: StepMetrics,
        storage: EventStorage,
        log_on_stage: Callable[[Mapping[str, Any]], bool] = lambda _: False,
    ) -> None:
        self._metrics, self._storage, self._log_on_stage = metrics, storage, log_on_stage
        self._latest: dict[str, Any] = {}
        self._rows: list[dict[str, Any]] = []

    def add(self, values: Mapping[str, Any]) -> None:
        """Log values in the current micro-batch."""
        if not self._log_on_stage(values):
            self._latest.update(values)

    def around(
        self, keep: Callable[[Any], Any], record: Callable[[list[Any], float], object]
    ) -> tuple[Callable[[Any], Any], Callable[[list[Any], float], object]]:
        """``keep`` and ``record`` of a step, which also keep and record what is logged."""

        def keep_both(logs: Any) -> Any:
            self._rows.append(self._latest)
            self._latest = {}
            return keep(logs)

        def record_both(kept: list[Any], data_time: float) -> None:
            record(kept, data_time)
            rows, self._rows = self._rows, []
            # The first value may be of a later micro-batch.
            missing: list[dict[str, Any]] = [{}] * (len(kept) - len(rows))
            self._metrics.put_logged(self._storage, missing + rows[-len(kept) :])

        return keep_both, record_both


def as_tensor(value: Any, device: torch.device) -> Tensor:
    """A number as a tensor on ``device``; unlike a copy, this does not wait for the device."""
    return value if isinstance(value, Tensor) else torch.full((), value, device=device)


def _copies(scalars: Mapping[str, Any]) -> dict[str, Any]:
    """The scalars, which the update may change where they are parameters."""
    return {k: v.detach().clone() if isinstance(v, Tensor) else v for k, v in scalars.items()}
