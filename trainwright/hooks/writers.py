"""Pass the run's metrics to the writers periodically."""

from collections.abc import Sequence

from trainwright.events.writers.base import EventWriter
from trainwright.events.writers.writer_thread import WriterDispatcher
from trainwright.hooks.base import HookBase


class PeriodicWriter(HookBase):
    """Write every ``period`` iterations, after the last one, and at the end of training, also after a failure.

    The writers run asynchronously; the training waits for them only at its end. An exception of a writer ends the
    training at the next write.

    Register it last, so that it writes the values of other hooks.
    """

    _writes_evaluations = False  # whenever there is an evaluation

    def __init__(self, writers: Sequence[EventWriter], period: int = 20) -> None:
        self._period = period
        self._dispatcher = WriterDispatcher(writers)
        self._written_results: object = None

    def before_train(self) -> None:
        if self.trainer.storage.written is None:
            self.trainer.storage.written = self.trainer.start_iter - 1
        self._written_results = self.trainer.last_eval_results
        self._dispatcher.begin(self.trainer.storage)

    def after_step(self) -> None:
        iteration = self.trainer.iter + 1
        is_due = iteration % self._period == 0
        if is_due:
            self.trainer.storage.written = self.trainer.iter
        if is_due or iteration == self.trainer.max_iter:
            self._write()

    def complete_last_row(self, *, is_evaluated: bool) -> None:
        """For a run that continues after the end of a shorter one: rewrite the row of that run's last iteration.

        With its final evaluation, as a longer run writes it; without, if the longer run has no such row.
        """
        storage, last = self.trainer.storage, self.trainer.start_iter - 1
        if storage.written == last or (is_evaluated and self._writes_evaluations):
            storage.written = last
            self._dispatcher.hold_for_files(storage)

    def after_train(self) -> None:
        try:
            self._write(is_last=True)  # the final evaluation
        finally:
            self._dispatcher.close()

    def _write(self, *, is_last: bool = False) -> None:
        results = self.trainer.last_eval_results
        is_of_evaluation, self._written_results = results is not self._written_results, results
        self._dispatcher.write(self.trainer.storage, keep=is_last or is_of_evaluation)
