"""Save a checkpoint every n epochs or batches."""

import os
from functools import partial
from typing import Any

from trainwright.base.errors import ConfigError, checked_arguments
from trainwright.config.foreign_names import inner_key_hint
from trainwright.hooks.callbacks.base import Callback, TrainerControl
from trainwright.hooks.callbacks.logs import Logs


class ModelCheckpointCallback(Callback):
    """Request a checkpoint every ``every_n_epoch`` epochs, or every ``every_n_iteration`` batches.

    The trainer's Checkpointer saves the complete training state before the next iteration.

    Args:
        filepath: the folder of the checkpoints; ``"./"`` means the run's own.
        every_n_epoch, every_n_iteration: one of the two, a whole number >= 1; the other is -1.

    Raises:
        ConfigError: neither is set, or both.
        ConfigTypeError: it has no such argument.
    """

    @checked_arguments(partial(inner_key_hint, "model_checkpoint"))
    def __init__(
        self,
        trainercontrol: TrainerControl | None,
        filepath: str | os.PathLike[str] = "./",
        every_n_epoch: int = -1,
        every_n_iteration: int = -1,
    ) -> None:
        given = [period for period in (every_n_epoch, every_n_iteration) if period not in (-1, None)]
        if len(given) != 1 or type(given[0]) is not int or given[0] < 1:
            raise ConfigError(
                f"ModelCheckpointCallback: got every_n_epoch={every_n_epoch!r}, every_n_iteration="
                f"{every_n_iteration!r}; one of the two must be a whole number >= 1, the other -1."
            )
        self.trainercontrol = trainercontrol
        self.filepath = os.fspath(filepath)
        self.every_n_epoch = -1 if every_n_epoch is None else every_n_epoch
        self.every_n_iteration = -1 if every_n_iteration is None else every_n_iteration

    def __repr__(self) -> str:
        return (
            f"ModelCheckpointCallback(trainercontrol, {self.filepath!r}, every_n_epoch={self.every_n_epoch},"
            f" every_n_iteration={self.every_n_iteration})"
        )

    def on_epoch_end(self, epochs: int, logs: Logs) -> None:
        if self.every_n_epoch > 0 and epochs % self.every_n_epoch == 0:
            self._save()

    def on_train_batch_end(self, batch: Any, logs: Logs) -> None:
        if self.every_n_iteration > 0 and logs["global_step"] % self.every_n_iteration == 0:
            self._save()

    def _save(self) -> None:
        if self.trainercontrol is None:
            raise ConfigError("ModelCheckpointCallback.trainercontrol: got None; pass the trainer's trainercontrol.")
        self.trainercontrol.should_save = True
        self.trainercontrol.save_dir = None if self.filepath in ("", ".", "./") else self.filepath
