"""The step of a model that is cut into pipeline stages: a window's micro-batches are those of the pipeline.

The last stage computes outputs and losses with the code of a step without pipeline: there, a call of the model returns
the outputs that the stages have computed. The other stages learn the logged values at the next log line, as means over
all processes; or after each window, if something needs them there.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import RandomSampler

from trainwright.base.devices import wide_dtype
from trainwright.base.dist import all_gather_object, gather_over_pipeline
from trainwright.base.errors import ConfigError
from trainwright.engine.accumulation import TOKENS
from trainwright.engine.step import Step
from trainwright.parallel.pipeline import Pipeline


class Logged(NamedTuple):
    """What a stage knows of the logged values in the first window."""

    names: tuple[str, ...]  # on a stage without the loss, of the loss alone
    is_by_tokens: bool  # whether losses are weighted by tokens, which the other stages need to divide gradients
    is_by_samples: bool  # which each stage knows


class PipelineStep(Step):
    """Reads all micro-batches of a window, and trains on them at once.

    Args:
        to_row, from_row: what is kept of a micro-batch as scalars by name, and the reverse.
        logs_of: the logs of a micro-batch, for ``after_batch``, from what is kept of it.
        update_weights: called on all stages with what is kept of the micro-batches; None: ``end_window`` updates.
        shows_each: whether all stages need the logged values after each window, not only at log lines.

    Attributes:
        after_output: called on the last stage with the logs and the batch of each micro-batch; None: not needed.
    """

    def __init__(
        self,
        *arguments: Any,
        pipeline: Pipeline,
        to_row: Callable[[Any], Mapping[str, Any]],
        from_row: Callable[[dict[str, Tensor]], Any],
        logs_of: Callable[[Any], Mapping[str, Any]],
        update_weights: Callable[[list[Any]], None] | None = None,
        loss_name: str,
        shows_each: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self.after_output: Callable[[Any, Any], None] | None = None
        self._pipeline, self._to_row, self._from_row, self._logs_of = pipeline, to_row, from_row, logs_of
        self._update_weights, self._loss_name, self._shows_each = update_weights, loss_name, shows_each
        self._logged: Logged | None = None  # of the last stage
        self._is_shared = False  # whether any process needs the values after each window
        self._no_value = torch.full((), torch.nan, device=pipeline.device)
        self._has_finished = False  # a micro-batch of this run

    def run(self) -> None:
        """One update of the weights."""
        phases, clock, update = self._phases, time.perf_counter, self.update
        length = self._begin_window()
        assert update.begin is not None, "the means of stages are weighted"
        start = clock()
        read = update.begin(length, self._batches.next)
        batches = list[Any]()
        for left in range(length - 1, -1, -1):
            update.is_window_end = left == 0
            batches.append(read())
            if self._begin_batch is not None:
                self._begin_batch(batches[-1])
        data_time = clock() - start
        phases.data += data_time

        start = clock()
        rows: list[dict[str, Any]] = []
        try:
            self._pipeline.run(batches, partial(self._finish, rows))
        except Exception as error:
            self._explain(error, batches[-1])
            raise
        if self._logged is None:
            self._agree(rows)
        assert self._logged is not None, "agreed"
        if rows:
            self._check_rows(rows)
        is_shared, share = self._is_shared, self._share if self._is_shared else self._own
        kept = [self._from_row(row) for row in share(rows, length)]
        update.batch = batches[-1]
        phases.forward += self._pipeline.forward_s
        phases.backward += self._pipeline.backward_s
        phases.waiting += clock() - start - self._pipeline.forward_s - self._pipeline.backward_s
        if self.after_batch is not None and is_shared:  # else it was set during the run, by a callback that is added
            for one, batch in zip(kept, batches, strict=True):
                self.after_batch(self._logs_of(one), batch)
        if self._update_weights is not None:
            self._update_weights(kept)
        self._end_window(kept, data_time)

    def _finish(self, rows: list[dict[str, Any]], outputs: Any, batch: Any) -> Tensor:
        """The loss of a micro-batch, on the last stage."""
        update = self.update
        update.batch = batch
        self._pipeline.prepare(outputs, batch)
        with nullcontext() if self._has_finished else _parameters_refused(self.model):
            logs = self.train(self.model, batch)
        self._has_finished = True
        rows.append(dict(self._to_row(logs if self._keep is None else self._keep(logs))))
        if self.after_output is not None:
            self.after_output(logs, batch)
        differentiate: Any = update.differentiate
        loss: Tensor = differentiate.take()
        return loss

    def _agree(self, rows: list[dict[str, Any]]) -> None:
        """Learn what the last stage logs, and whether a process needs it after each window."""
        mean = self.update.mean
        is_by_samples = not mean.is_by_tokens and mean.counter.targets is None
        here = Logged(tuple(rows[0]) if rows else (self._loss_name,), mean.is_by_tokens, is_by_samples)
        self._logged = last = gather_over_pipeline(here)[self._pipeline.last_rank]
        needs = self._shows_each or self.after_batch is not None or self.update.record_loss is not None
        # Of all pipelines: where values are shared, all stages take part in the mean over all processes.
        self._is_shared = any(all_gather_object(needs or last.is_by_tokens or TOKENS in last.names))

    def _check_rows(self, rows: list[dict[str, Any]]) -> None:
        assert self._logged is not None, "after the first window"
        names = self._logged.names
        for row in rows:
            if tuple(row) != names:
                raise ConfigError(
                    f"The model returned {', '.join(row)} after {', '.join(names)}. With a pipeline it must return"
                    " scalars of the same names for every batch."
                )

    def _own(self, rows: list[dict[str, Any]], length: int) -> list[dict[str, Any]]:
        """The scalars of the window's micro-batches on the last stage; on the others, which weigh 0, placeholders."""
        if self._pipeline.is_last:
            return rows
        assert self._logged is not None, "after the first window"
        self.update.mean.weights = [0] * length
        return [dict.fromkeys(self._logged.names, self._no_value) for _ in range(length)]

    def _share(self, rows: list[dict[str, Any]], length: int) -> list[dict[str, Tensor]]:
        """The scalars of the window's micro-batches, on all stages. One message, without waiting for the device."""
        assert self._logged is not None, "after the first window"
        pipeline, mean, device = self._pipeline, self.update.mean, self._pipeline.device
        names, is_by_tokens, is_by_samples = self._logged
        values = torch.zeros(length, 1 + len(names), dtype=wide_dtype(device), device=device)
        if pipeline.is_last:
            by = [1] * length if is_by_samples else mean.weights
            columns = [by, *([row[name] for row in rows] for name in names)]
            values = torch.stack([_column(column, device) for column in columns], dim=1).to(values.dtype)
        pipeline.broadcast(values)
        if not pipeline.is_last:
            mean.receive(None if is_by_samples else values[:, 0], is_by_tokens=is_by_tokens)
        return [dict(zip(names, row[1:].unbind(), strict=True)) for row in values]


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
    sampler = getattr(loader, "sampler", None)
    if isinstance(sampler, RandomSampler) and sampler.generator is None:
        raise ConfigError(
            f"{name}: {type(loader).__name__} shuffles by the random generator of its process, so that pipeline stages"
            " would read different batches. Pass generator=torch.Generator().manual_seed(0) to it."
        )


def _column(values: Iterable[Any], device: torch.device) -> Tensor:
    wide = wide_dtype(device)
    scalars = [value.full_tensor() if hasattr(value, "full_tensor") else value for value in values]
    return torch.stack([torch.as_tensor(value, device=device).detach().reshape(()).to(wide) for value in scalars])
