"""What the objects door does around its steps: as the hooks of the other door, but due by steps and epochs."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trainwright.engine.run_folder import RunFolder
from trainwright.events.writers import EventWriter
from trainwright.hooks.base import HookBase
from trainwright.hooks.checkpoint import Saver
from trainwright.hooks.evaluate import EvalHook
from trainwright.hooks.writers import PeriodicWriter

IsDue = Callable[[], bool]  # asked after an update


class Evaluate(EvalHook):
    """Evaluate whenever it is due and once after the last update. Results are put under ``evaluation/``."""

    def __init__(self, is_due: IsDue, evaluate: Callable[[], dict[str, Any]]) -> None:
        super().__init__(0, evaluate)
        self._is_due = is_due

    def after_step(self) -> None:
        if self._is_due() and self.trainer.iter + 1 != self.trainer.max_iter:
            self._evaluate()

    def _evaluate(self) -> None:
        with self.trainer.storage.name_scope("evaluation"):
            super()._evaluate()


class SaveSteps(HookBase):
    """Save a checkpoint named by its step whenever it is due and after the last update.

    It is taken between updates, when every hook has finished the one before.
    """

    def __init__(self, checkpointer: Saver, is_due: IsDue, save: Callable[[], None]) -> None:
        self._checkpointer = checkpointer
        self._is_due = is_due
        self._save = save
        self._due: int | None = None  # the update to be saved
        self._is_prepared = False

    def after_step(self) -> None:
        if self._is_due():
            self._due = self.trainer.iter
        if not self._is_prepared:
            self._is_prepared = True
            self._checkpointer.prepare()

    def before_step(self) -> None:
        if self._due is not None:
            self._due = None
            self._save()

    def after_train(self) -> None:
        # A failure inside update `due` leaves trainer.iter there: the hooks after us have not finished it.
        is_finished = self.trainer.iter >= self.trainer.max_iter
        try:
            if is_finished or (self._due is not None and self.trainer.iter == self._due + 1):
                self._save()
        finally:
            self._due = None
            self._checkpointer.wait(alone=not is_finished)


class WriteSteps(PeriodicWriter):
    """Write whenever it is due, after the last update, and at the end of training."""

    def __init__(self, is_due: IsDue, writers: Sequence[EventWriter]) -> None:
        super().__init__(writers)
        self._is_due = is_due

    def after_step(self) -> None:
        if self._is_due() or self.trainer.iter + 1 == self.trainer.max_iter:
            self.trainer.storage.written = self.trainer.iter
            self._write()

    def _write(self) -> None:
        self.trainer.storage.samples = self.trainer.consumed_samples
        super()._write()


class TrainerFolder(RunFolder):
    """The run folder of the objects door: ``training_config.yaml``, ``metrics.csv`` and ``checkpoints/`` in it."""

    signs_of_a_run = ("metrics.json", "checkpoints/*/manifest.json")
    written_by_a_run = (*RunFolder.written_by_a_run, "training_config.yaml", "metrics.csv*")
    checkpoints = ()

    def write_config(self, config: Any) -> None:
        """Make the folder and write ``training_config.yaml`` into it."""
        self.path.mkdir(parents=True, exist_ok=True)
        config.save_to_yaml(self.path / "training_config.yaml")

    def _entries_of_the_run(self) -> list[Path]:
        entries = super()._entries_of_the_run()
        has_checkpoints = next(self.path.glob("checkpoints/*/manifest.json"), None) is not None
        return [*entries, self.path / "checkpoints"] if has_checkpoints else entries
