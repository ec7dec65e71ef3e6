"""What callbacks wish of a training, and how it is granted."""

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
        should_training_stop: this iteration is the last one. What belongs to the end of a training follows.
        should_epoch_stop: the rest of the epoch is left out, where the trainer can do that.
        should_save: save a checkpoint, between this iteration and the next.
        should_evaluate: evaluate now.
        should_log: write the metrics now.
        save_dir: the folder of what ``should_save`` saves; None: where the run's own checkpoints are.
        has_failed: not a wish: in ``on_train_end``, whether the training has ended before its last iteration was done.
    """

    should_training_stop: bool = False
    should_epoch_stop: bool = False
    should_save: bool = False
    should_evaluate: bool = False
    should_log: bool = False
    save_dir: str | None = None
    has_failed: bool = False

    def reset(self) -> None:
        """As new, for a training that begins."""
        self.should_training_stop = self.should_epoch_stop = False
        self.should_save = self.should_evaluate = self.should_log = self.has_failed = False
        self.save_dir = None


logger = logging.getLogger("trainwright.hooks")

_WISHES = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")


class Wishes:
    """Acts on the flags of ``control`` and clears them.

    ``actions``: what is called for a flag, by the flag's name; None: the training has no way to do that.
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
        self._checkpointers: dict[str, Checkpointer] = {}  # of folders that are not the run's own

    def agree(self) -> None:
        """Make a wish of one process that of all."""
        if get_world_size() == 1:
            return
        everybody = all_gather_object([getattr(self._control, wish) for wish in _WISHES])
        for wish, wished in zip(_WISHES, zip(*everybody, strict=True), strict=True):
            setattr(self._control, wish, any(wished))

    def grant(self, trainer: Any) -> None:
        """Everything but a save, which is for :meth:`save`, between two iterations."""
        control = self._control
        if control.should_epoch_stop or control.should_evaluate or control.should_log:
            self._act()
        if control.should_training_stop and trainer.iter + 1 < trainer.max_iter:
            trainer.max_iter = trainer.iter + 1
            logger.info("A callback stops the training after iteration %d.", trainer.iter + 1)

    def _act(self) -> None:
        for wish, action in self._actions.items():
            if getattr(self._control, wish):
                setattr(self._control, wish, False)
                if action is None:
                    raise ConfigError(f"A callback has set trainercontrol.{wish}; this training has no way to do that.")
                action()

    def save(self, own: Checkpointer | None) -> None:
        """Save if that is wished; ``own`` is the trainer's Checkpointer."""
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
        """Until what was saved in other folders than the run's own is on disk."""
        for checkpointer in self._checkpointers.values():
            checkpointer.wait(alone=alone)
