"""The step of a model that is cut into pipeline stages: a window's micro-batches are those of the pipeline.

The last stage computes outputs and losses with the code of a step without pipeline: there, a call of the model returns
the outputs that the stages have computed. The other stages learn the logged values at the next log line, as means over
all processes; or after each window, if something needs them there. What the user's code logs while a loss is computed
(``trainer.log``) they learn at the next log line.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainwright.base.devices import wide_dtype
from trainwright.base.dist import all_gather_object, gather_over_pipeline
from trainwright.base.errors import ConfigError
from trainwright.data.sampler import is_drawn_by_process
from trainwright.engine.accumulation import TOKENS, weighted_mean
from trainwright.engine.step_metrics import Row, StepMetrics
from trainwright.engine.update import Update
from trainwright.events.storage import EventStorage
from trainwright.models.outputs import scalars_of
from trainwright.parallel.pipeline import Pipeline

_LOSS = "loss of the step"  # no name of a model's outputs
_IN_LOSS = "the loss of a pipeline"  # where values are logged


class Logged(NamedTuple):
    """What a stage knows of the logged values in the first window."""

    names: tuple[str, ...]  # on a stage without the loss, of the loss alone
    is_by_tokens: bool  # whether losses are weighted by tokens, which the other stages need to divide gradients
    is_by_samples: bool  # which each stage knows
    own_names: tuple[str, ...]  # what the user's code logs there


class TrainStages:
    """The ``train`` of a :class:`~trainwright.engine.step.Step` on stages: all micro-batches of a window at once.

    It collects the micro-batches, and trains on them with the last one.

    Args:
        update: of the step; it may be replaced during a run.
        train: called on the last stage with the outputs of the pipeline in place of those of the model; returns logs.
        keep: returns the row of the logs of a micro-batch.
        after_output: called on the last stage with the logs and the batch of each micro-batch.
        needs_rows: whether all stages need the logged values after each window, not only at log lines.

    Attributes:
        after_batch: called on all stages with the logs and the batch of each micro-batch; None: not needed.
        rows: of the latest window.
        own_rows: what the user's code has logged while the losses of its micro-batches were computed; empty ones on
            the other stages.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        update: Callable[[], Update],
        train: Callable[[Any, Any], Any],
        keep: Callable[[Any], Row],
        *,
        after_output: Callable[[Any, Any], None] | None = None,
        needs_rows: bool = False,
    ) -> None:
        self._pipeline, self._update, self.train, self._keep = pipeline, update, train, keep
        self.after_batch: Callable[[Any, Any], None] | None = None
        self._after_output, self._needs_rows = after_output, needs_rows
        self._batches: list[Any] = []
        self._logged: Logged | None = None  # of the last stage
        self._is_shared = False  # whether any process needs the values after each window
        self._no_value = torch.full((), torch.nan, device=pipeline.device)
        self._has_finished = False  # a micro-batch of this run
        self.rows: list[Row] = []
        self.own_rows: list[dict[str, Any]] = []
        self._computes_loss = False

    def __call__(self, model: Any, batch: Any) -> None:
        update = self._update()
        self._batches.append(batch)
        if update.is_window_end:
            batches, self._batches = self._batches[-update.mean.length :], []  # without those of a window that failed
            self._train_window(update, model, batches)

    def _train_window(self, update: Update, model: Any, batches: list[Any]) -> None:
        start, phases, pipeline = time.perf_counter(), update.phases, self._pipeline
        outputs: list[Row] = []
        self.own_rows = []
        pipeline.run(batches, partial(self._loss, update, model, outputs))
        if self._logged is None:
            self._agree(update, outputs)
        assert self._logged is not None, "agreed"
        self._check_names(outputs)
        self._check_own_names()
        share = self._share if self._is_shared else self._own
        self.rows = share(update, outputs, len(batches))
        update.batch = batches[-1]
        phases.backward += pipeline.backward_s
        phases.waiting += time.perf_counter() - start - pipeline.forward_s - pipeline.backward_s
        if update.record_loss is not None:
            update.record_loss(weighted_mean([loss for loss, _ in self.rows], update.mean.weights))
        if (
            self.after_batch is not None and self._is_shared
        ):  # else it was set during the run, by a callback that is added
            for (loss, _), batch in zip(self.rows, batches, strict=True):
                self.after_batch({"step_loss": loss}, batch)

    def _loss(self, update: Update, model: Any, rows: list[Row], outputs: Any, batch: Any) -> Tensor:
        """The loss of a micro-batch, on the last stage."""
        update.batch = batch
        self._pipeline.prepare(outputs, batch)
        self.own_rows.append({})
        self._computes_loss = True
        try:
            with nullcontext() if self._has_finished else _parameters_refused(model):
                logs = self.train(model, batch)
        finally:
            self._computes_loss = False
        self._has_finished = True
        rows.append(self._keep(logs))
        if self._after_output is not None:
            self._after_output(logs, batch)
        differentiate: Any = update.differentiate
        loss: Tensor = differentiate.take()
        return loss

    def _agree(self, update: Update, rows: list[Row]) -> None:
        """Learn what the last stage logs, and whether a process needs it after each window."""
        mean = update.mean
        is_by_samples = not mean.is_by_tokens and mean.counter.targets is None
        names, own_names = tuple(_values(rows[0])) if rows else (_LOSS,), _names(self.own_rows)
        here = Logged(names, mean.is_by_tokens, is_by_samples, own_names)
        self._logged = last = gather_over_pipeline(here)[self._pipeline.last_rank]
        needs = self._needs_rows or self.after_batch is not None or update.record_loss is not None
        # Of all pipelines: where values are shared, all stages take part in the mean over all processes.
        self._is_shared = any(all_gather_object(needs or last.is_by_tokens or TOKENS in last.names))

    def _check_names(self, rows: list[Row]) -> None:
        assert self._logged is not None, "after the first window"
        for row in rows:
            if tuple(values := _values(row)) != self._logged.names:
                now, before = (
                    ", ".join(name for name in names if name != _LOSS) or "a loss alone"
                    for names in (values, self._logged.names)
                )
                raise ConfigError(
                    f"The model returned {now} after {before}. With a pipeline it must return scalars of the same names"
                    " for every batch."
                )

    def _check_own_names(self) -> None:
        names = _names(self.own_rows)
        if self._pipeline.is_last and names != self.own_names:
            raise ConfigError(
                f"trainer.log: {', '.join(names) or 'nothing'} was logged while the losses of an update were computed,"
                f" after {', '.join(self.own_names) or 'nothing'} in the first one. With a pipeline the names must be"
                " the same in every update: the other stages have to know them."
            )

    @property
    def own_names(self) -> tuple[str, ...]:
        """The names of what the user's code logs while losses are computed; none before the first window."""
        return () if self._logged is None else self._logged.own_names

    def log(self, values: Mapping[str, Any]) -> bool:
        """Log values of the user's code in the micro-batch whose loss is being computed; False if there is none."""
        if self._computes_loss:
            self.own_rows[-1].update(values)
        return self._computes_loss

    def put_logged(self, metrics: StepMetrics, storage: EventStorage) -> None:
        """Store the means of what the user's code has logged in the latest window."""
        if self._pipeline.is_last:
            metrics.put_logged(storage, self.own_rows, _IN_LOSS)
        else:
            metrics.put_nothing_logged(storage, self.own_names, _IN_LOSS)

    def _own(self, update: Update, rows: list[Row], length: int) -> list[Row]:
        """The rows of the window's micro-batches on the last stage; on the others, which weigh 0, placeholders."""
        if self._pipeline.is_last:
            return rows
        assert self._logged is not None, "after the first window"
        update.mean.weights = [0] * length
        return [_row(dict.fromkeys(self._logged.names, self._no_value)) for _ in range(length)]

    def _share(self, update: Update, rows: list[Row], length: int) -> list[Row]:
        """The rows of the window's micro-batches, on all stages. One message, without waiting for the device."""
        assert self._logged is not None, "after the first window"
        pipeline, mean, device = self._pipeline, update.mean, self._pipeline.device
        names, is_by_tokens, is_by_samples, _ = self._logged
        values = torch.zeros(length, 1 + len(names), dtype=wide_dtype(device), device=device)
        if pipeline.is_last:
            by = [1] * length if is_by_samples else mean.weights
            columns = [by, *([_values(row)[name] for row in rows] for name in names)]
            values = torch.stack([_column(column, device) for column in columns], dim=1).to(values.dtype)
        pipeline.broadcast(values)
        if not pipeline.is_last:
            mean.receive(None if is_by_samples else values[:, 0], is_by_tokens=is_by_tokens)
        return [_row(dict(zip(names, row[1:].unbind(), strict=True))) for row in values]


def _values(row: Row) -> dict[str, Any]:
    """The values of a row by name."""
    loss, scalars = row
    return {_LOSS: loss, **scalars_of(scalars or {})}


def _names(rows: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    return tuple(sorted({name for row in rows for name in row}))


def _row(values: dict[str, Any]) -> Row:
    return values.pop(_LOSS), values or None


class Captured:
    """Keeps what is to be differentiated: the schedule of the pipeline does it."""

    def __init__(self, grad_scaler: torch.amp.GradScaler | None, device: torch.device) -> None:
        self._scaler, self._loss = grad_scaler, None
        if grad_scaler is not None:
            grad_scaler.scale(torch.zeros((), device=device))  # stages without a loss need its scale, too

    def __call__(self, loss: Tensor, **options: Any) -> None:
        self._loss = loss if self._scaler is None else self._scaler.scale(loss)  # type: ignore[assignment]

    def take(self) -> Tensor:
        """What to differentiate for the latest micro-batch."""
        loss, self._loss = self._loss, None
        if loss is None:
            raise ConfigError("The step of a pipeline must compute the loss of each batch with one call of the model.")
        return loss


def pipeline_settings(pipeline: Pipeline, grad_scaler: torch.amp.GradScaler | None, optimizer: Any) -> dict[str, Any]:
    """The arguments of :class:`~trainwright.engine.update.Update` for stages."""
    pipeline.tied.check_settings(optimizer.param_groups)
    captured = Captured(grad_scaler, pipeline.device)
    return {"differentiate": captured, "is_staged": True, "has_loss": pipeline.is_last}


@contextmanager
def _parameters_refused(model: Any) -> Iterator[None]:
    """Raise if a loss reads the model's parameters: those of the other stages would be missing, without a message."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise ConfigError(
            "compute_loss reads the model's parameters: with pipeline_parallel_size > 1 it has those of the last stage"
            " only, so the loss would be another one. A penalty on weights belongs into the optimizer (weight_decay)."
        )

    model.named_parameters = refuse  # parameters() calls it
    try:
        yield
    finally:
        del model.named_parameters


def refuse_own_step(pipeline: Pipeline | None, name: str, methods: Iterable[str]) -> None:
    """Raise if a user's own step cannot run on pipeline stages."""
    found = [*methods]
    if pipeline is not None and found:
        raise ConfigError(
            f"{name}.{found[0]} is overridden: with pipeline_parallel_size > 1 the trainer's own step is needed, since"
            " forward and backward passes of all micro-batches of an update run at once, and each process has the"
            " gradients of its layers only. compute_loss of the model, or of a Trainer, may be overridden. Or use"
            " tensor parallelism or ZeRO, which run any step."
        )


def refuse_unseeded_loader(loader: Any, name: str) -> None:
    """Raise if a loader shuffles by the random generator of its process, which differs between stages."""
    if is_drawn_by_process(loader):
        raise ConfigError(
            f"{name}: {type(loader).__name__} shuffles by the random generator of its process, so that pipeline stages"
            " would read different batches. Pass generator=torch.Generator().manual_seed(0) to its sampler, or with"
            " shuffle=True to the loader."
        )


def _column(values: Iterable[Any], device: torch.device) -> Tensor:
    wide = wide_dtype(device)
    scalars = [value.full_tensor() if hasattr(value, "full_tensor") else value for value in values]
    return torch.stack([torch.as_tensor(value, device=device).detach().reshape(()).to(wide) for value in scalars])
