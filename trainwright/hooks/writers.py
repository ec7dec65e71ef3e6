"""Hand the run's metrics to the writers, now and then."""

from collections.abc import Sequence

from trainwright.events.writers.base import EventWriter
from trainwright.events.writers.dispatcher import WriterDispatcher
from trainwright.hooks.base import HookBase


class PeriodicWriter(HookBase):
    """Write every ``period`` iterations, after the last one, and at the end of training, whatever ended it.

    The writers are called beside the training, which waits for none of them until its end. What one of them raises
    ends the training at the next time that something is written.

    Stands last in the list of hooks, so that it writes what the others have put.
    """

    _writes_evaluations = False  # whenever there is one

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
        """A run goes on after the end of a shorter one: the row of that one's last iteration is written again.

        With its final evaluation, as a run that did not end there has written it; not where that one has no such row.
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
