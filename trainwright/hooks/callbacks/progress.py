"""The progress of an epoch: a bar, printed lines, or lines in the log."""

import logging
import math
import sys
import time
from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from trainwright.base.dist import is_main_process
from trainwright.base.errors import checked_arguments
from trainwright.base.notebook import is_kernel
from trainwright.base.terminal import print_line
from trainwright.events.epoch_means import EpochLength, epoch_around, epoch_at, first_of_epoch
from trainwright.events.rate import Position, clock
from trainwright.events.writers.progress import LiveBar, bar_stream, live_bars, shown_values
from trainwright.hooks.base import HookBase, has_failed
from trainwright.hooks.callbacks.base import Callback
from trainwright.hooks.callbacks.logs import Logs
from trainwright.hooks.checkpoint import BestCheckpointer
from trainwright.hooks.due import Moment, Recurring

logger = logging.getLogger("trainwright.hooks")

_REFRESH_S = 0.5  # the shortest period of reading losses for the bar: reading one synchronizes
_PERIOD_S = 30.0  # of the lines in the log


class PrintCallback(Callback):
    """Print a line every ``step_frequency`` batches, and one after each evaluation, on rank 0.

    ``epoch=1/2, global_step=1, epoch_loss=6.65, epoch_metric=0.0`` and
    ``epoch=1/2, eval_global_step=0, eval_epoch_loss=6.46, eval_epoch_metric=0.0``, where ``eval_global_step`` is the
    last batch of that evaluation, counted from 0 over all evaluations. Names without a value are omitted.
    """

    @checked_arguments()
    def __init__(self, total_epoch_num: int, step_frequency: int = 16) -> None:
        self.total_epoch_num = total_epoch_num
        self.step_frequency = step_frequency

    def __repr__(self) -> str:
        return f"PrintCallback({self.total_epoch_num}, step_frequency={self.step_frequency})"

    def on_train_batch_end(self, batch: Any, logs: Logs) -> None:
        if logs["global_step"] % self.step_frequency == 0:
            self._print(logs, _shown(logs, "global_step", "epoch_loss", "epoch_metric"))

    def on_eval_end(self, logs: Logs) -> None:
        last_batch = {"eval_global_step": max(0, logs["eval_global_step"] - 1)}
        self._print(logs, last_batch | _shown(logs, "eval_epoch_loss", "eval_epoch_metric"))

    def _print(self, logs: Logs, values: dict[str, Any]) -> None:
        if is_main_process():
            fields = [f"{name}={value}" for name, value in values.items()]
            print_line(", ".join([f"epoch={logs['epoch']}/{self.total_epoch_num}", *fields]))


class ProgressBarCallback(Callback):
    """A progress bar for each epoch, with ``loss``, ``metric`` and, after an evaluation, ``eval_loss, eval_metric``.

    A step is a batch of ``train_dataloader``. Shown on a terminal, and not beside another bar, such as the trainer's
    own. After each epoch a line on stderr: ``[epoch 1/2] loss=0.500, metric=0.250: 3/3 steps``. Only on rank 0.
    """

    @checked_arguments()
    def __init__(self, total_epoch_num: int, train_dataloader: Sized) -> None:
        self.total_epoch_num = total_epoch_num
        self.train_dataloader = train_dataloader
        self._bar: LiveBar | None = None
        self._is_open = False  # an epoch
        self._epoch = self._done = self._first = 0  # steps
        self._values: dict[str, str] = {}
        self._next_refresh = 0.0  # seconds

    def on_epoch_begin(self, epochs: int, logs: Logs) -> None:
        self._close()
        if not is_main_process():
            return
        self._is_open, self._epoch = True, logs["epoch"]
        self._done = self._first = logs.get("epoch_step", 0)
        terminal = bar_stream()
        if terminal is not None:
            title, number = f"[epoch {self._epoch}/{self.total_epoch_num}]", len(self.train_dataloader)
            position = lambda: Position(self._done, number, self._first)  # noqa: E731
            self._bar = LiveBar(position, lambda: self._values, file=terminal, title=title, stays=False)
            self._bar.start()

    def on_train_batch_end(self, batch: Any, logs: Logs) -> None:
        if not self._is_open:
            return
        self._done += 1
        now = time.monotonic()
        if now >= self._next_refresh or self._done == len(self.train_dataloader):
            self._next_refresh = now + _REFRESH_S
            self._read(logs)

    def on_eval_end(self, logs: Logs) -> None:
        if self._is_open:
            self._read(logs, "eval_loss", "eval_metric")

    def on_epoch_end(self, epochs: int, logs: Logs) -> None:
        self._close()

    def on_train_end(self, logs: Logs) -> None:
        self._close()

    def _read(self, logs: Logs, *names: str) -> None:
        wanted = {"loss": "epoch_loss", "metric": "epoch_metric"}
        wanted |= {name: name.replace("eval_", "eval_epoch_") for name in names}
        self._values = self._values | {
            name: f"{value:.3f}" for name, key in wanted.items() for value in _shown(logs, key).values()
        }

    def _close(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        values = ", ".join(f"{name}={value}" for name, value in self._values.items())
        done = f"{self._done}/{len(self.train_dataloader)} steps"
        print_line(f"[epoch {self._epoch}/{self.total_epoch_num}] {values}: {done}", file=sys.stderr)
        self._values = {}


PrintCallBack = PrintCallback  # Towhee's spelling
ProgressBarCallBack = ProgressBarCallback


@dataclass(frozen=True, slots=True)
class LinePlan:
    """When there is a line after an epoch, and what it shows.

    Attributes:
        every: the epochs between two lines.
        unit: what the lines are numbered by.
    """

    iterations_per_epoch: EpochLength
    every: int = 1
    unit: Literal["epoch", "iteration"] = "epoch"


class EpochLines(HookBase):
    """Log a line after epochs: the means of the losses, metrics, results of the evaluation, time.

    ``plan`` is called at the start of each training; None: no lines. ``best``: its metric is marked in the epoch of a
    new best value.
    """

    slot = "show"

    def __init__(self, plan: Callable[[], LinePlan | None], best: BestCheckpointer | None = None) -> None:
        self._plan, self._best = plan, best
        self._at = self._end = self._last = 0  # iterations done
        self._epoch = 0  # the line comes at its start
        lines = Recurring(lambda: self.trainer.iterations_done >= self._next, lambda done: self._next)
        self.due = (lines, Moment.LAST)
        self._start = 0.0  # seconds

    @property
    def shows_results(self) -> bool:
        done = self.trainer.iterations_done
        is_shown = done >= self._next or (done >= self.trainer.max_iter and self._is_open())
        return bool(is_shown and not self.is_idle)

    def before_train(self) -> None:
        plan = self._plan()
        self.is_idle = plan is None
        if plan is None:
            return
        self._lines, self._per_epoch = plan, plan.iterations_per_epoch
        done = self.trainer.start_iter
        self._start = time.monotonic()
        called = self.trainer.called_hooks
        if called is not None and type(self).__name__ not in called:
            done -= 1  # the line of the last iteration may be due
        self._last = epoch_at(self._per_epoch, done)[1]  # of a resumed epoch all values
        self._plan_next(done)

    def after_step(self) -> None:
        done = self.trainer.iterations_done
        if done >= self._next:
            self._log()
        elif done >= self.trainer.max_iter:
            self.trainer.storage.line_at = done  # that of after_train

    def after_train(self) -> None:
        if not (self.is_idle or has_failed(self.trainer)) and self._is_open():
            self._log()  # with the final evaluation

    def _is_open(self) -> bool:
        """Whether iterations were made since the last line."""
        return bool(self.trainer.iterations_done > max(self._last, self.trainer.start_iter))

    def _plan_next(self, done: int) -> None:
        epoch, every = epoch_at(self._per_epoch, done)[0], self._lines.every
        self._epoch, self._end = (epoch // every + 1) * every, -1

    @property
    def _next(self) -> int:
        """After how many iterations the next line is due: an epoch may get another length when it starts."""
        end = 0 if self.is_idle else first_of_epoch(self._per_epoch, self._epoch)
        if end != self._end:
            self._end = end
            self._at = end if end < self.trainer.max_iter else sys.maxsize  # after_train logs the last epoch
        return self._at

    def _log(self) -> None:
        trainer, now, storage, unit = self.trainer, time.monotonic(), self.trainer.storage, self._lines.unit
        found = self._new_values()
        values = shown_values(found)
        best = self._best
        if best is not None and best.best_iter is not None and best.best_iter >= self._last:
            values |= {n: f"{values[n]} (best)" for n in best.names if n in found and found[n][0] == best.best}
        at = Position(trainer.iterations_done, trainer.max_iter, per_epoch=self._per_epoch)
        number, total = (at.epoch, at.num_epochs) if unit == "epoch" else (at.done, at.total)
        seconds = f"{now - self._start:.1f} s"
        row = {unit: str(number), **values, "time": seconds}
        is_in_table = any(bar.add_row(row) for bar in live_bars)
        left = "" if live_bars else storage.rate.time_left(at.done, at.total)
        shown = [f"{n} {value}" for n, value in values.items() if n != "lr"] or [f"{at.done} iterations"]
        if storage.evaluated_weights and not storage.results.isdisjoint(values):
            shown.append(f"evaluated: {storage.evaluated_weights}")
        head = f"{unit.capitalize()} {number:{len(str(total))}}/{total}"
        text = "  ".join(filter(None, [head, *shown, seconds, left]))
        logger.info("%s", text, extra={"progress": is_in_table})
        storage.line_at, self._start, self._last = at.done, now, at.done
        self._plan_next(at.done)

    def _new_values(self) -> dict[str, tuple[float, int]]:
        """The means of the newest epoch, as in its row, or since the last line if these count iterations."""
        storage, done = self.trainer.storage, self.trainer.iterations_done
        if self._lines.unit == "epoch":
            first, following = epoch_around(self._per_epoch, done - 1)
            storage.end_epoch(first, following if done >= following else first)
            found = {n: one for n, one in storage.latest_with_smoothing_hint().items() if one[1] >= first}
        else:
            found = storage.means_since(self._last)
        # Results of an evaluation within the epoch had a line.
        return {n: one for n, one in found.items() if n not in storage.results or one[1] >= done - 1}


def line_plan(
    iterations_per_epoch: EpochLength | None, max_iter: int, log_period: int, *, eval_period: int | None = None
) -> LinePlan | None:
    """The lines of a run of several epochs; None for one epoch.

    At most one line per ``log_period`` iterations (0: any), or per evaluation where those are more frequent. The table
    of a notebook has all epochs, and of one epoch the evaluations.
    """
    epochs = iterations_per_epoch or max_iter
    length = epochs if isinstance(epochs, int | Fraction) else first_of_epoch(epochs, 1)
    if length >= max_iter:
        if not is_kernel() or not eval_period or eval_period >= max_iter:
            return None
        return LinePlan(eval_period, unit="iteration")
    period = 0 if is_kernel() else min(log_period, eval_period or log_period)
    return LinePlan(epochs, every=max(1, math.ceil(period / length)))


class EpochProgress(HookBase):
    """Log a line every 30 seconds: the latest values, and the time left in the epoch. Shorter epochs log none.

    ``is_shown`` is called at the start of each training. ``position()`` returns the epoch, the number of epochs, the
    steps done in the epoch, its number of steps, and those of an update.
    """

    slot = "show"
    in_copies = False

    def __init__(self, is_shown: Callable[[], bool], position: Callable[[], tuple[int, int, int, int, int]]) -> None:
        self._is_shown, self._position = is_shown, position
        self._last = 0.0  # seconds

    def before_train(self) -> None:
        self.is_idle = not self._is_shown()
        self._last = time.monotonic()

    def after_step(self) -> None:
        if time.monotonic() - self._last >= _PERIOD_S:
            self._log()
            self._last = time.monotonic()

    def _log(self) -> None:
        epoch, num_epochs, step, num_steps, steps_per_update = self._position()
        if step >= num_steps:  # the line of the completed epoch follows
            return
        storage = self.trainer.storage
        values = (f"{name} {value}" for name, value in shown_values(storage.latest_with_smoothing_hint()).items())
        storage.rate.update(self.trainer.iterations_done)
        left_s = storage.rate.left_s(math.ceil((num_steps - step) / steps_per_update), with_interruptions=False)
        left = [f"ETA of the epoch {clock(left_s)}"] if left_s else []  # 0: unknown
        fields = [f"Epoch {epoch}/{num_epochs}", f"step {step}/{num_steps}", *values, *left]
        logger.info("%s", "  ".join(fields), extra={"progress": True})


def _shown(logs: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """The entries of ``logs`` with these names, as far as they exist."""
    return {name: logs[name] for name in names if name in logs}
