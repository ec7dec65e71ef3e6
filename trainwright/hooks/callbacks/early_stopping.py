"""Stop a training whose metric does not improve."""

import logging
import math
from functools import partial
from typing import Any

from trainwright.base.errors import ConfigError, ConfigKeyError, ConfigTypeError, checked_arguments, nearest_name
from trainwright.config.foreign_names import inner_key_hint
from trainwright.evaluation.objective import MODES, objective_of_name
from trainwright.hooks.callbacks.base import Callback, TrainerControl
from trainwright.hooks.callbacks.logs import Logs

logger = logging.getLogger("trainwright.hooks")

# Trainers' name of the first metric of an evaluation, and the monitor of a run without a metric.
_FIRST_METRIC, _LOSS = "eval_epoch_metric", "eval_epoch_loss"

_USAGE = "EarlyStoppingCallback(None, {}, patience=3, mode='auto')"


class EarlyStoppingCallback(Callback):
    """Stop after ``patience`` consecutive evaluations whose ``monitor`` was no better than the best before.

    A ``monitor`` of the training, such as ``"epoch_loss"``, counts at the end of each epoch instead.

    The rules are in ``docs/callbacks.md``. In a run without a metric, ``"eval_epoch_metric"`` means
    ``"eval_epoch_loss"``, where lower is better.

    Args:
        monitor: a name in ``logs``, such as ``"eval_epoch_metric"`` or ``"epoch_loss"``.
        min_delta: the smallest difference that counts as better.
        patience: in evaluations; 0 means 1.
        mode: "max" or "min", or "auto": by the name of ``monitor``, if it is known ("…loss": min, "…accuracy":
            max, and the metrics of torchmetrics).
        baseline: a value counts as better only if it is better than this, too.
        start: so many evaluations (epochs) come first, whose values are compared but do not count as no better.

    Raises:
        ConfigError: an argument is invalid. At the first evaluation, if ``logs`` has no ``monitor``.

    Attributes:
        best: the best value so far, None before the first.
        wait: consecutive evaluations (epochs) that were no better, after the first ``start`` ones.
        seen: evaluations (epochs) with a value so far.
        stopped_epoch: the epoch in which it stopped, None if it has not.
        is_default: the user did not name the monitor: if the metric is missing, it does nothing.
        turned_off_by: how to turn it off, for messages.
    """

    is_default = False
    turned_off_by = "remove this callback to turn it off"

    @checked_arguments(partial(inner_key_hint, "early_stopping"), usage=_USAGE.format("'eval_loss'"))
    def __init__(
        self,
        trainercontrol: TrainerControl | None = None,
        monitor: str = "",
        min_delta: float = 0.0,
        patience: int = 0,
        mode: str = "max",
        baseline: float | None = None,
        start: int = 0,
    ) -> None:
        if trainercontrol is not None and not isinstance(trainercontrol, TrainerControl):  # as other libraries have it
            name = repr(trainercontrol if isinstance(trainercontrol, str) else monitor or "eval_loss")
            raise ConfigTypeError(
                f"EarlyStoppingCallback.trainercontrol: got {trainercontrol!r}; the first argument is"
                f" trainer.trainercontrol or None, the second the monitor: write {_USAGE.format(name)}."
            )
        if not isinstance(monitor, str) or not monitor:
            raise ConfigError(f"EarlyStoppingCallback.monitor: got {monitor!r}; it must be the name of a metric.")
        if not math.isfinite(min_delta) or min_delta < 0:
            raise ConfigError(f"EarlyStoppingCallback.min_delta: got {min_delta!r}; it must be a number >= 0.")
        for name, number in (("patience", patience), ("start", start)):
            if not isinstance(number, int) or isinstance(number, bool) or number < 0:
                raise ConfigError(f"EarlyStoppingCallback.{name}: got {number!r}; it must be a whole number >= 0.")
        self.trainercontrol = trainercontrol
        self.monitor = monitor
        self.min_delta = min_delta
        self.patience = patience
        self.mode = _resolve_mode(mode, monitor)
        self.baseline = baseline
        self.start = start
        self._requested = monitor
        self.best: float | None = None
        self.wait = self.seen = 0
        self.stopped_epoch: int | None = None
        self._is_logged = False  # what it does
        self._counted_at: int | None = None  # the newest step or epoch that wait takes into account
        self._is_extra = False  # whether that was the extra evaluation at the end of a run
        self._before: tuple[float | None, int, int] = (None, 0, 0)  # best, wait and seen, before the newest epoch
        self._is_cut = False  # whether the run has ended within that epoch

    def __repr__(self) -> str:
        return (
            f"EarlyStoppingCallback(trainercontrol, {self.monitor!r}, min_delta={self.min_delta},"
            f" patience={self.patience}, mode={self.mode!r}, baseline={self.baseline}, start={self.start})"
        )

    @property
    def has_ended_run(self) -> bool:
        return self.stopped_epoch is not None

    def on_train_begin(self, logs: Logs) -> None:
        self._reset()

    def on_eval_end(self, logs: Logs) -> None:
        if not self._find_monitor(logs) or not self._is_of_evaluations:
            return
        step = logs.get("global_step")
        is_new = step is None or step != self._counted_at  # a resume at the end of a run evaluates it again
        if is_new:
            # The extra evaluation at the end of a shorter run has counted for the next one that is due.
            was_extra, control = self._is_extra, self.trainercontrol
            self._counted_at, self._is_extra = step, control is not None and control.is_extra_evaluation
            is_new = not was_extra
        self._count(logs, logs.get("epoch"), is_new=is_new)

    def on_epoch_end(self, epochs: int, logs: Logs) -> None:
        if not self._is_of_evaluations and self._find_monitor(logs):
            if epochs == self._counted_at:  # it ends again, after a failure or in a longer run
                self.best, self.wait, self.seen = self._before
            self._before, self._counted_at = (self.best, self.wait, self.seen), epochs
            self._is_cut = self.trainercontrol is not None and self.trainercontrol.is_cut_epoch
            self._count(logs, epochs, is_new=True)

    @property
    def _is_of_evaluations(self) -> bool:
        return self.monitor.startswith("eval")

    def _counted(self, number: int) -> str:
        return f"{number} {'evaluation' if self._is_of_evaluations else 'epoch'}{'s' * (number != 1)}"

    def _count(self, logs: Logs, epoch: int | None, *, is_new: bool) -> None:
        value = float(logs[self.monitor])
        self.seen += is_new
        self.wait += is_new and self.seen > self.start
        if math.isfinite(value) and (self.best is None or self._is_better(value, self.best)):
            self.best = value
            if self.baseline is None or self._is_better(value, self.baseline):
                self.wait = 0
        if self._stop(epoch):
            logger.info(
                "Early stopping: %s was no better than its best, %s, for %s (patience=%d): stopping in epoch %s;"
                " %s.",
                self.monitor, "none that is finite" if self.best is None else f"{self.best:.5g}",
                self._counted(self.wait), self.patience, epoch, self.turned_off_by,
            )  # fmt: skip

    def on_train_end(self, logs: Logs) -> None:
        has_failed = self.trainercontrol is not None and self.trainercontrol.has_failed
        if not (self.is_default or has_failed) and self.best is None and self.seen == 0 and self._is_of_evaluations:
            logger.warning("Early stopping had no values: no evaluation computed %s.", self.monitor)

    def state_dict(self) -> dict[str, Any]:
        return {
            "monitor": self._requested,
            "watched": self.monitor,
            "best": self.best,
            "wait": self.wait,
            "seen": self.seen,
            "stopped_epoch": self.stopped_epoch,
            "counted_at": self._counted_at,
            "is_extra": self._is_extra,
            "before": self._before,
            "is_cut": self._is_cut,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["monitor"] not in (self._requested, self.monitor):
            logger.warning("Early stopping watched %s, now %s: it restarts.", state["monitor"], self.monitor)
            return
        self._watch(state["watched"])
        self.best, self.wait = state["best"], state["wait"]
        self.seen = state.get("seen", self.start + self.wait)  # a checkpoint of 0.1.0 has no start
        self._counted_at, self._is_extra = state["counted_at"], state["is_extra"]
        before = state.get("before", (self.best, self.wait))
        self._before = (*before, self.seen)[:3] if len(before) < 3 else tuple(before)
        if state.get("is_cut"):  # the value of a part of the epoch: a longer run has that of the complete one
            self.best, self.wait, self.seen = self._before
        self._stop(state["stopped_epoch"])

    def _reset(self) -> None:
        self.best, self.wait, self.stopped_epoch, self._counted_at = None, 0, None, None
        self.seen = 0
        self._is_extra = self._is_logged = self._is_cut = False
        self._before = (None, 0, 0)

    def _is_better(self, value: float, other: float) -> bool:
        return value - self.min_delta > other if self.mode == "max" else value + self.min_delta < other

    def _stop(self, epoch: int | None) -> bool:
        """Stop the training if the patience is over; returns whether it is."""
        if self.wait < max(1, self.patience):
            return False
        self.stopped_epoch = epoch
        if self.trainercontrol is None:
            raise ConfigError("EarlyStoppingCallback.trainercontrol: got None; pass the trainer's trainercontrol.")
        self.trainercontrol.should_training_stop = True
        self.trainercontrol.stop_reason = f"early stopping: {self.monitor} was no better for {self._counted(self.wait)}"
        return True

    def _watch(self, monitor: str) -> None:
        if monitor == _LOSS and self.monitor == _FIRST_METRIC:
            self.mode = "min"
        self.monitor = monitor

    def _find_monitor(self, logs: Logs) -> bool:
        if self.is_default and self.monitor not in logs:
            return False
        if self.monitor not in logs and f"eval_{self.monitor}" in logs:
            self._watch(f"eval_{self.monitor}")  # the name without prefix, as in metric_for_best_model
        if self.monitor == _FIRST_METRIC and self.monitor not in logs and _LOSS in logs:
            self._watch(_LOSS)
        if self.monitor not in logs:
            near = nearest_name(self.monitor, logs)
            raise ConfigKeyError(
                f"EarlyStoppingCallback.monitor: there is no metric {self.monitor!r}.{near}"
                f" Allowed: {', '.join(sorted(logs))}."
            )
        if not self._is_logged:
            self._is_logged = True
            logger.info(
                "Early stopping is on: it ends the run after %s without a %s %s%s%s; %s.",
                self._counted(max(1, self.patience)), "higher" if self.mode == "max" else "lower", self.monitor,
                f" (by more than min_delta={self.min_delta:g})" if self.min_delta else "",
                f", not counting the first {self.start}" if self.start else "", self.turned_off_by,
            )  # fmt: skip
        return True


def _resolve_mode(mode: str, monitor: str) -> str:
    if mode in ("max", "min"):
        return mode
    if mode != "auto":
        raise ConfigError(f"EarlyStoppingCallback.mode: got {mode!r}; it must be 'max', 'min' or 'auto'.")
    objective = objective_of_name(monitor)
    if objective is not None:
        return MODES[objective]
    raise ConfigError(
        f"EarlyStoppingCallback.mode: got 'auto', but the name {monitor!r} does not show whether higher is better; "
        "set mode='max' or mode='min'."
    )
