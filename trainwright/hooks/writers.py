"""Pass the run's metrics to the writers periodically."""

from collections.abc import Callable, Sequence

from trainwright.events.writers.base import EventWriter
from trainwright.events.writers.writer_thread import WriterDispatcher
from trainwright.hooks.base import HookBase, Period, condition


class PeriodicWriter(HookBase):
    """Write when ``period`` is over, after each evaluation, after the last iteration, and at the end of training, also
    after a failure.

    The writers run asynchronously; the training waits for them only at its end. An exception of a writer ends the
    training at the next write. Register this hook last, so that it writes the values of other hooks.

    Args:
        writers: closed at the end of the training; or a function that returns new ones for each training.
    """

    in_copies = False

    def __init__(
        self, writers: Sequence[EventWriter] | Callable[[], Sequence[EventWriter]], period: Period = 20
    ) -> None:
        self._build_writers = writers if callable(writers) else None
        self._dispatcher = WriterDispatcher([] if callable(writers) else writers)
        self._is_due = condition(period)
        self._written_results: object = None  # of the latest evaluation that is written

    def before_train(self) -> None:
        if self._build_writers is not None:
            self._dispatcher = WriterDispatcher(self._build_writers())
        if self.trainer.storage.written is None:
            self.trainer.storage.written = self.trainer.start_iter - 1
        self._written_results = self.trainer.last_eval_results
        self._dispatcher.begin(self.trainer.storage)

    def after_step(self) -> None:
        trainer = self.trainer
        if self._is_due(trainer) or trainer.last_eval_results is not self._written_results:
            self.write()
        elif trainer.iter + 1 == trainer.max_iter:
            self._write()

    def write(self) -> None:
        storage, at = self.trainer.storage, self.trainer.iter
        if storage.written != at:
            storage.written_before, storage.written = storage.written, at
        self._write()

    def before_longer_run(self, *, is_evaluated: bool) -> None:
        """Rewrite the row of the shorter run's last iteration.

        With its final evaluation, as a longer run writes it; without, if the longer run has no such row.
        """
        storage, last = self.trainer.storage, self.trainer.start_iter - 1
        if storage.written == last or is_evaluated:
            storage.written = last
            self._dispatcher.hold_for_files(storage)

    def after_train(self) -> None:
        try:
            self._write(is_last=True)  # the final evaluation
        finally:
            self._dispatcher.close()

    def _write(self, *, is_last: bool = False) -> None:
        results, storage = self.trainer.last_eval_results, self.trainer.storage
        is_of_evaluation, self._written_results = results is not self._written_results, results
        storage.samples = self.trainer.consumed_samples
        self._dispatcher.write(storage, keep=is_last or is_of_evaluation)
