"""Losses and metrics as printed lines."""

from typing import Any

from trainwright.hooks.callbacks.base import Callback, shown
from trainwright.hooks.callbacks.logs import Logs
from trainwright.parallel.dist import is_main_process
from trainwright.terminal import print_line


class PrintCallback(Callback):
    """Print a line every ``step_frequency`` batches, and one after each evaluation, of the process with rank 0.

    ``epoch=1/2, global_step=1, epoch_loss=6.65, epoch_metric=0.0`` and
    ``epoch=1/2, eval_global_step=0, eval_epoch_loss=6.46, eval_epoch_metric=0.0``, where ``eval_global_step`` is the
    last batch of that evaluation, counted from 0 over all evaluations. What there is no value of is left out.
    """

    def __init__(self, total_epoch_num: int, step_frequency: int = 16) -> None:
        self.total_epoch_num = total_epoch_num
        self.step_frequency = step_frequency

    def __repr__(self) -> str:
        return f"PrintCallback({self.total_epoch_num}, step_frequency={self.step_frequency})"

    def on_train_batch_end(self, batch: Any, logs: Logs) -> None:
        if logs["global_step"] % self.step_frequency == 0:
            self._print(logs, shown(logs, "global_step", "epoch_loss", "epoch_metric"))

    def on_eval_end(self, logs: Logs) -> None:
        last_batch = {"eval_global_step": max(0, logs["eval_global_step"] - 1)}
        self._print(logs, last_batch | shown(logs, "eval_epoch_loss", "eval_epoch_metric"))

    def _print(self, logs: Logs, values: dict[str, Any]) -> None:
        if is_main_process():
            fields = [f"{name}={value}" for name, value in values.items()]
            print_line(", ".join([f"epoch={logs['epoch']}/{self.total_epoch_num}", *fields]))
