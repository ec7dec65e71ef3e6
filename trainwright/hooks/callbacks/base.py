"""The base class of callbacks: code that is called around epochs, batches and evaluations."""

from collections.abc import Mapping
from typing import Any

from trainwright.hooks.callbacks.control_requests import TrainerControl
from trainwright.hooks.callbacks.logs import Logs
from trainwright.hooks.overrides import overridable


@overridable
class Callback:
    """Override the methods you need; a method that is not overridden costs nothing.

    ``logs`` holds the latest values by name: ``global_step`` (batches trained on, over all resumes), ``epoch`` (from
    1), ``epoch_step``, ``eval_global_step``, ``lr``, ``step_loss``, ``epoch_loss`` …; in an evaluation
    ``eval_step_loss`` and, over its batches so far, ``eval_epoch_loss`` and ``eval_epoch_metric`` (the latter with one
    process); after it these over all batches and each result under ``eval_<name>``. Values read as floats.

    The order of calls::

        on_train_begin(logs)
        for each epoch:
            on_epoch_begin(epochs, logs)
            for each batch:
                on_train_batch_begin(batch, logs), on_batch_begin(batch, logs)
                on_train_batch_end(batch, logs), on_batch_end(batch, logs)
            if it is evaluated:
                on_eval_begin(logs)
                for each batch:
                    on_eval_batch_begin(batch, logs), on_batch_begin(batch, logs)
                    on_eval_batch_end(batch, logs), on_batch_end(batch, logs)
                on_eval_end(logs)
            on_epoch_end(epochs, logs)
        on_train_end(logs)

    A callback whose state must survive a resume has ``state_dict()`` and ``load_state_dict(state)``; the latter is
    called after ``on_train_begin``.

    Attributes:
        model, optimizer: the trained model and its optimizer; set before ``on_train_begin``.
        trainercontrol: flags that request actions of the training.
    """

    model: Any = None
    optimizer: Any = None
    trainercontrol: TrainerControl | None = None

    def set_model(self, model: Any) -> None:
        self.model = model

    def set_optimizer(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def set_trainercontrol(self, trainercontrol: TrainerControl) -> None:
        self.trainercontrol = trainercontrol

    def on_train_begin(self, logs: Logs) -> None:
        """Called before the first batch, also of a training that continues from a checkpoint."""

    def on_train_end(self, logs: Logs) -> None:
        """Called once at the end, also after a failure: then ``trainercontrol.has_failed`` is True."""

    def on_epoch_begin(self, epochs: int, logs: Logs) -> None:
        """Called before an epoch, and when a resume continues within one: then ``logs["epoch_step"]`` is above 0."""

    def on_epoch_end(self, epochs: int, logs: Logs) -> None:
        """Called after an epoch is trained and evaluated."""

    def on_batch_begin(self, batch: Any, logs: Logs) -> None:
        """Called before a batch, of training or of evaluation."""

    def on_batch_end(self, batch: Any, logs: Logs) -> None:
        """Called after a batch, of training or of evaluation."""

    def on_train_batch_begin(self, batch: Any, logs: Logs) -> None:
        """Called before a training batch, and before ``on_batch_begin``."""

    def on_train_batch_end(self, batch: Any, logs: Logs) -> None:
        """Called after a training batch, and before ``on_batch_end``."""

    def on_eval_batch_begin(self, batch: Any, logs: Logs) -> None:
        """Called before a batch of evaluation, and before ``on_batch_begin``."""

    def on_eval_batch_end(self, batch: Any, logs: Logs) -> None:
        """Called after a batch of evaluation, and before ``on_batch_end``."""

    def on_eval_begin(self, logs: Logs) -> None:
        """Called before an evaluation."""

    def on_eval_end(self, logs: Logs) -> None:
        """Called after an evaluation: ``logs`` has its results."""


def shown(logs: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """The entries of ``logs`` with these names, as far as they exist."""
    return {name: logs[name] for name in names if name in logs}
