"""Hand the run's metrics to the writers, now and then."""

from collections.abc import Sequence

from trainwright.events.writers.base import EventWriter
from trainwright.hooks.base import HookBase


class PeriodicWriter(HookBase):
    """Write every ``period`` iterations, after the last one, and at the end of training, whatever ended it.

    Stands last in the list of hooks, so that it writes what the others have put.
    """

    def __init__(self, writers: Sequence[EventWriter], period: int = 20) -> None:
        self._writers = list(writers)
        self._period = period

    def before_train(self) -> None:
        if self.trainer.storage.written is None:
            self.trainer.storage.written = self.trainer.start_iter - 1

    def after_step(self) -> None:
        iteration = self.trainer.iter + 1
        if iteration % self._period == 0 or iteration == self.trainer.max_iter:
            self.trainer.storage.written = self.trainer.iter
            self._write()

    def after_train(self) -> None:
        self._write()  # the final evaluation
        for writer in self._writers:
            writer.close()

    def _write(self) -> None:
        for writer in self._writers:
            writer.write()  # of the current storage, the trainer's
