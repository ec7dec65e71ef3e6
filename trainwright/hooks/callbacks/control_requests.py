"""Requests of callbacks to a training, and how they are applied."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trainwright.checkpoint.checkpointer import Checkpointer
from trainwright.config.errors import ConfigError
from trainwright.parallel.dist import all_gather_object, get_world_size


@dataclass
class TrainerControl:
    """A callback sets a flag; the training acts on it at the end of the iteration, and clears it.

    Attributes:
        should_training_stop: this iteration is the last one. The end of the training follows.
        should_epoch_stop: skip the rest of the epoch, if the trainer supports it.
        should_save: save a checkpoint, between this iteration and the next.
        should_evaluate: evaluate now.
        should_log: write the metrics now.
        save_dir: the folder for ``should_save``; None: the run's own checkpoints.
        has_failed: not a request: in ``on_train_end``, whether the training ended before its last iteration.
    """

    should_training_stop: bool = False
    should_epoch_stop: bool = False
    should_save: bool = False
    should_evaluate: bool = False
    should_log: bool = False
    save_dir: str | None = None
    has_failed: bool = False

    def reset(self) -> None:
        """Reset all flags for a new training."""
        self.should_training_stop = self.should_epoch_stop = False
        self.should_save = self.should_evaluate = self.should_log = self.has_failed = False
        self.save_dir = None


logger = logging.getLogger("trainwright.hooks")

_REQUESTS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")


class ControlRequests:
    """Applies the flags of ``control`` and clears them.

    ``actions``: the function for each flag; None: the training does not support it.
    """

    def __init__(
        self,
        control: TrainerControl,
        save: Callable[[Checkpointer], None],
        actions: dict[str, Callable[[], object] | None],
    ) -> None:
        self._control = control
        self._save_by = save
        self._actions = actions
        self._checkpointers: dict[str, Checkpointer] = {}  # for folders other than the run's own

    def synchronize(self) -> None:
        """Apply a request of one process to all."""
        if get_world_size() == 1:
            return
        all_requests = all_gather_object([getattr(self._control, name) for name in _REQUESTS])
        for name, requested in zip(_REQUESTS, zip(*all_requests, strict=True), strict=True):
            setattr(self._control, name, any(requested))

    def apply(self, trainer: Any) -> None:
        """Apply every request except a save, which :meth:`save` handles between two iterations."""
        control = self._control
        if control.should_epoch_stop or control.should_evaluate or control.should_log:
            self._act()
        if control.should_training_stop and trainer.iter + 1 < trainer.max_iter:
            trainer.max_iter = trainer.iter + 1
            trainer.storage.reduce()  # the last row is written now
            logger.info("A callback stops the training after iteration %d.", trainer.iter + 1)

    def _act(self) -> None:
        for name, action in self._actions.items():
            if getattr(self._control, name):
                setattr(self._control, name, False)
                if action is None:
                    raise ConfigError(f"A callback has set trainercontrol.{name}; this training does not support it.")
                action()

    def save(self, own: Checkpointer | None) -> None:
        """Save if requested; ``own`` is the trainer's Checkpointer."""
        if not self._control.should_save:
            return
        folder, self._control.should_save, self._control.save_dir = self._control.save_dir, False, None
        if own is None:
            raise ConfigError("A callback has set trainercontrol.should_save; this training has no checkpointer.")
        if folder is None:
            self._save_by(own)
            return
        if folder not in self._checkpointers:
            self._checkpointers[folder] = Checkpointer(
                own.model,
                folder,
                save_to_disk=own.save_to_disk,
                asynchronous=own.asynchronous,
                attachments=own.attachments,
                **dict[str, Any](own.checkpointables),
            )
        self._save_by(self._checkpointers[folder])

    def wait(self, *, alone: bool) -> None:
        """Wait for saves in folders other than the run's own."""
        for checkpointer in self._checkpointers.values():
            checkpointer.wait(alone=alone)
