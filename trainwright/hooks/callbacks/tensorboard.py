"""TensorBoard events of losses, metrics and the learning rate at each step."""

from collections.abc import Callable, Mapping
from typing import Any

from trainwright.base.dist import is_main_process
from trainwright.base.errors import checked_arguments
from trainwright.events.storage import EventStorage
from trainwright.hooks.callbacks.base import Callback
from trainwright.hooks.callbacks.logs import Logs

_FLUSH_STEPS = 100  # batches between two synchronizations


class TensorBoardCallback(Callback):
    """Write ``lr, epoch_loss, step_loss, epoch_metric`` at ``global_step``, and evaluations at
    ``eval_global_step``: ``eval_step_loss`` of each batch, then ``eval_epoch_loss`` and ``eval_epoch_metric``.

    Args:
        summary_writer_constructor: ``torch.utils.tensorboard.SummaryWriter``, or a function with its signature.
        log_dir: the folder; None: one in ``./runs`` that the writer names.
        comment: the suffix of that name.
    """

    @checked_arguments()
    def __init__(
        self, summary_writer_constructor: Callable[..., Any], log_dir: str | None = None, comment: str = ""
    ) -> None:
        self.summary_writer_constructor = summary_writer_constructor
        self.log_dir = log_dir
        self.comment = comment
        self._writer: Any = None
        self._first_step = 1
        self._waiting = EventStorage()  # values that are not synchronized yet
        self._num_waiting = 0

    def on_train_begin(self, logs: Logs) -> None:
        self._first_step = logs["global_step"] + 1

    def on_train_batch_end(self, batch: Any, logs: Logs) -> None:
        self._record(logs, logs["global_step"], "lr", "epoch_loss", "step_loss", "epoch_metric")

    def on_eval_batch_end(self, batch: Any, logs: Logs) -> None:
        self._record(logs, logs["eval_global_step"], "eval_step_loss")

    def on_eval_end(self, logs: Logs) -> None:
        self._record(logs, max(0, logs["eval_global_step"] - 1), "eval_epoch_loss", "eval_epoch_metric")
        self._write()

    def on_epoch_end(self, epochs: int, logs: Logs) -> None:
        self._write()

    def on_train_end(self, logs: Logs) -> None:
        self._write()
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _record(self, logs: Mapping[str, Any], step: int, *names: str) -> None:
        if not is_main_process():
            return
        self._waiting.iter = step
        for name in names:
            if name in logs:
                self._waiting.put_scalar(name, logs.unread(name) if isinstance(logs, Logs) else logs[name])
        self._num_waiting += 1
        if self._num_waiting >= _FLUSH_STEPS:
            self._write()

    def _write(self) -> None:
        waiting, self._waiting, self._num_waiting = self._waiting.histories(), EventStorage(), 0
        if waiting and self._writer is None:
            # A resumed run hides the events of a killed one after the checkpoint.
            resumed = {"purge_step": self._first_step} if self._first_step > 1 else {}
            self._writer = self.summary_writer_constructor(log_dir=self.log_dir, comment=self.comment, **resumed)
        for name, history in waiting.items():
            for value, step in history.values():
                self._writer.add_scalar(name, value, step)
        if waiting:
            self._writer.flush()


TensorBoardCallBack = TensorBoardCallback  # Towhee's spelling
