"""Metrics of training batches, computed from the outputs of the training step: no second forward pass."""

import logging
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from trainwright.base.dist import get_world_size, is_any
from trainwright.base.errors import ConfigError, UserError
from trainwright.config.spec import RunSpec
from trainwright.evaluation.comparison import Comparison
from trainwright.hooks.base import HookBase
from trainwright.hooks.callbacks import RunCallbacks
from trainwright.hooks.method_overrides import Overrides
from trainwright.models.outputs import predictions_of
from trainwright.models.targets import target_of

logger = logging.getLogger("trainwright.engine")


class TrainMetrics(HookBase):
    """Metrics over the epoch so far. Computed when they are read, and stored when ``is_due``.

    ``record`` receives the outputs of the model; ``add`` then counts them, with their batch.

    Each process counts its own batches. Stored values cover all processes. Values read in the same update are equal to
    these, since a single process may read them; at other times they cover the process's own batches.

    Args:
        make_handler: builds the object that computes them; called with the first batch.
        labelled: the batch with its labels where ``target_of`` finds them.
        find_comparison: how to compare outputs with a batch, from both.
        is_padding_batch: whether the latest batch does not count; called only with several processes.
    """

    slot = "evaluate"
    is_state_of_rank = True

    def __init__(
        self,
        make_handler: Callable[[], Any],
        is_due: Callable[[], int],
        is_epoch_end: Callable[[], int],
        labelled: Callable[[Any], Any],
        find_comparison: Callable[[Any, Any], Comparison],
        is_padding_batch: Callable[[], bool],
    ) -> None:
        self._make_handler = make_handler
        self._is_due, self._is_epoch_end = is_due, is_epoch_end
        self.due = (is_due, is_epoch_end)
        self._labelled, self._find_comparison = labelled, find_comparison
        self._comparison: Comparison | None = None  # None until the first batch
        self._outputs: Any = None
        self._is_relabelled: bool | None = None  # None until the first batch
        self._is_epoch_over = False
        self._has_values = False
        self._is_counted = False
        self.is_on = True
        self._of_all: dict[str, float] = {}  # over the batches of all processes,
        self._read_at = -1  # after this number of updates
        self._watching: RemovableHandle | None = None
        self._is_padding_batch = is_padding_batch
        self._is_alone = get_world_size() == 1

    @cached_property
    def _handler(self) -> Any:
        return self._make_handler()

    def record(self, outputs: Any) -> None:
        """Keep the model's outputs for the batch of the next ``add``."""
        self._outputs = outputs

    def watch(self, model: nn.Module) -> None:
        """Record each output of ``model`` in training, for a user's own step, until the training ends."""

        def record(module: nn.Module, _: Any, outputs: Any) -> None:
            # A compiled program passes its outputs itself.
            if module.training and not torch.compiler.is_compiling():
                self._outputs = outputs

        self._watching = model.register_forward_hook(record)

    def after_train(self) -> None:
        if self._watching is not None:
            self._watching.remove()
            self._watching = None

    def before_estimate(self) -> None:
        self.is_on = False  # they read values, after the peak of the memory

    def add_now(self, inputs: Any) -> None:
        """Count a batch before the end of its step; the following ``add`` does not count it again."""
        self.add(None, inputs)
        self._is_counted = True

    def add(self, step_logs: Any, inputs: Any) -> None:
        """Count a batch. ``step_logs`` are not read."""
        if not self._is_alone and self._is_padding_batch():
            self._is_counted = False
            if self._has_values and self._is_epoch_over:
                self._begin_epoch()
            return
        if self._is_counted:
            self._is_counted = False
            return
        outputs, self._outputs = self._outputs, None
        if not self.is_on:
            return
        if self._is_relabelled is None:
            self._is_relabelled = self._labelled(inputs) is not inputs
        if self._is_relabelled:
            inputs = self._labelled(inputs)
        scores, labels = predictions_of(outputs), target_of(inputs)
        if scores is None or labels is None:
            self._turn_off("the model's output holds no scores" if scores is None else "the batch holds no labels")
            return
        if self._comparison is None:
            self._comparison = self._find_comparison(outputs, inputs)
            if self._comparison.refusal is not None:
                self._turn_off(self._comparison.refusal)
                return
            self._comparison.declare_to(self._handler)
        scores, labels = self._comparison.aligned(scores, labels)
        if self._is_epoch_over:
            self._begin_epoch()
        try:
            self._handler.update(scores, labels)
        except ConfigError:  # a setting is wrong or missing
            raise
        except UserError as error:  # soft labels of mixup, for example; evaluations raise it for theirs
            self._handler.reset()
            self._has_values = False
            why = str(error).removesuffix(".")
            self._turn_off(f"{why}. It ends the first evaluation, too, unless its labels differ", logging.WARNING)
            return
        self._has_values = True

    def _begin_epoch(self) -> None:
        self._is_epoch_over = False
        self._handler.reset()

    def _turn_off(self, why: str, level: int = logging.INFO) -> None:
        logger.log(level, "No training metric is computed: %s.", why.removesuffix("."))
        self.is_on = False

    def read(self) -> dict[str, float]:
        """The metrics of this epoch so far, by name; those of the latest log line where a process counts nothing."""
        if self._read_at == self.trainer.iterations_done or not self._has_values:
            return self._of_all
        computed: dict[str, float] = self._handler.compute()
        return computed

    def first(self) -> float:
        """The first metric; NaN if there is none."""
        return next(iter(self.read().values()), float("nan"))

    def after_step(self) -> None:
        is_over = bool(self._is_epoch_end())
        self._is_epoch_over = is_over or self._is_epoch_over
        if not (is_over or self._is_due()) or not is_any(self._has_values):
            return
        if self._is_alone:
            self._store(self.read())
            return
        self._handler.all_ranks = True
        try:
            self._of_all = self._handler.compute()
        finally:
            self._handler.all_ranks = False
        self._read_at = self.trainer.iterations_done
        self._store(self._of_all)

    def _store(self, values: dict[str, float]) -> None:
        storage = self.trainer.storage
        storage.refuse_logged(values, "a metric of the training")
        hints = storage.smoothing_hints()
        for name, value in values.items():
            if not hints.get(name):  # else the model returns its own
                storage.put_scalar(name, value, smoothing_hint=False)

    def state_dict(self) -> dict[str, Any]:
        state = self._handler.state_dict() if self._has_values else None
        return {"handler": state, "is_epoch_over": self._is_epoch_over}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not state:
            logger.info("Training metrics restart: another number of processes saved them.")
            return
        self._is_epoch_over = state["is_epoch_over"]
        self._has_values = state["handler"] is not None
        if not self._has_values:
            return
        try:
            self._handler.load_state_dict(state["handler"])
        except ConfigError as error:  # other metrics than before
            self._has_values = False
            self._handler.reset()
            logger.warning("Training metrics restart: %s", error)


def measures_training(spec: RunSpec) -> bool:
    """Whether metrics of the training batches are computed."""
    asks = bool(spec.metrics) or (spec.metrics is None and spec.task is not None)
    return asks and spec.eval_strategy != "eval_epoch"


def after_batch_calls(
    overrides: Overrides,
    callbacks: RunCallbacks,
    metrics: TrainMetrics | None,
    *,
    model: nn.Module,
    set_train_mode: Callable[[], object],
    accumulates: bool,
    is_pipeline: bool,
) -> Callable[[Any, Any], None] | None:
    """What to do with the logs of each micro-batch and the batch, as little as possible; None for nothing.

    The storage has no values of single micro-batches if a run ``accumulates``, so callbacks need them. On a pipeline
    its last stage counts ``metrics``.
    """
    counted = None if is_pipeline or metrics is None else metrics.add
    own_metric = overrides.of("compute_metric", _nothing) if overrides.has("compute_metric") else None
    own_means = overrides.of("update_metrics", _nothing) if overrides.has("update_metrics") else None
    needs_each = (accumulates or is_pipeline) and len(callbacks.callbacks) > 0
    if own_metric is None and own_means is None and not (needs_each or overrides.has("train_step")):
        return counted

    def after_batch(step_logs: dict[str, Any], inputs: Any) -> None:
        if is_pipeline:
            callbacks.next_batch()
        if own_metric is not None:
            step_logs = {**step_logs, "epoch_metric": own_metric(model, inputs)}
            set_train_mode()  # the user's method may have changed the mode
        else:
            if own_means is not None:
                loss, metric = own_means(model, inputs, step_logs.get("step_loss"))
                step_logs = {**step_logs, "epoch_loss": loss, "epoch_metric": metric}
            if counted is not None:
                counted(step_logs, inputs)  # does nothing if the batch is already counted
        callbacks.record(step_logs)

    return after_batch


def _nothing(step_logs: Any, inputs: Any) -> None:
    """Used if nothing counts the batches of a step."""
