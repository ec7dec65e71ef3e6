"""Pass the run's metrics to the writers periodically."""

import logging
from collections.abc import Callable, Iterable, Sequence

from trainwright.base.errors import ConfigTypeError
from trainwright.events.writers.base import EventWriter, guarded
from trainwright.events.writers.writer_thread import WriterDispatcher
from trainwright.hooks.base import HookBase
from trainwright.hooks.due import Condition, Moment, Period

logger = logging.getLogger("trainwright.hooks")


class PeriodicWriter(HookBase):
    """Write when ``period`` is over, after each evaluation, after the last iteration, and at the end of training, also
    after a failure.

    The writers run asynchronously; the training waits for them only at its end. An exception of a writer ends the
    training at the next write, unless it :attr:`may fail <trainwright.events.EventWriter.may_fail>`.

    Args:
        writers: closed at the end of the training; or a function that returns new ones for each training.
        epoch_of: returns the first iteration of the epoch of an iteration, and that of the next epoch: the row at the
            end of an epoch has its means. None: there are no epochs.
    """

    slot = "show"
    in_copies = False

    def __init__(
        self,
        writers: Sequence[EventWriter] | Callable[[], Sequence[EventWriter]],
        period: Period = 20,
        *,
        epoch_of: Callable[[int], tuple[int, int]] | None = None,
    ) -> None:
        self._build_writers = writers if callable(writers) else None
        self._dispatcher = WriterDispatcher([] if callable(writers) else [*map(guarded, writers)])
        self._is_due = Condition(period)
        self.due = (self._is_due, Moment.RESULTS, Moment.LAST)
        self._written_results: object = None  # of the latest evaluation that is written
        self._written_iter = -1  # of the latest row
        self._has_warned = False
        self._epoch_of = epoch_of

    def before_train(self) -> None:
        if self._build_writers is not None:
            writers = self._build_writers()
            if isinstance(writers, str | EventWriter) or not isinstance(writers, Iterable):
                kind = self.trainer.__class__.__name__
                raise ConfigTypeError(
                    f"{kind}.build_writers returned {type(writers).__name__}; it must return a list of writers, for"
                    " example [*super().build_writers(), MyWriter()]."
                )
            self._dispatcher = WriterDispatcher([*map(guarded, writers)])
        if self.trainer.storage.written is None:
            self.trainer.storage.written = self.trainer.start_iter - 1
        self._written_results, self._written_iter = self.trainer.last_eval_results, -1
        self._dispatcher.begin(self.trainer.storage)

    def after_step(self) -> None:
        trainer = self.trainer
        is_last = trainer.iter + 1 == trainer.max_iter
        if self._is_due(trainer) or self._has_results():
            self._mark_epoch(is_last=is_last)
            self.write()
        elif is_last:
            self._mark_epoch(is_last=True)
            self._write()

    def _has_results(self) -> bool:
        """Whether there are results of an evaluation that are not written yet.

        Also those of this iteration from before a failure, in a training that continues.
        """
        storage = self.trainer.storage
        is_left_out = self.trainer.called_hooks is not None
        if is_left_out and any(storage.latest()[name][1] == storage.iter for name in storage.results):
            return True
        return self.trainer.last_eval_results is not self._written_results

    def _mark_epoch(self, *, is_last: bool) -> None:
        """Have the row that is written now show the means of its epoch, if this iteration ends it."""
        if self._epoch_of is None:
            return
        (first, following), storage = self._epoch_of(self.trainer.iter), self.trainer.storage
        storage.epoch_means.begin(first)
        if self.trainer.iter + 1 >= following:
            storage.end_epoch(first, following)
        elif is_last and first:  # the run ends within the last of several epochs
            storage.end_epoch(first, first)

    def warn_of_late(self, names: Iterable[str], iteration: int) -> None:
        """Warn once if values of ``iteration`` are logged after its row was written: no writer gets them."""
        if iteration == self._written_iter and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "trainer.log: %s came after the values of iteration %d were written, so that no writer gets it. A hook"
                ' that logs in after_step needs slot = "evaluate", which is before the writers. At the end of a'
                " training, log in on_epoch_end or on_eval_end.",
                ", ".join(map(repr, names)),
                self._written_iter + 1,
            )

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
        if self._epoch_of is not None and self._epoch_of(last + 1)[0] != last + 1:
            storage.epoch_means.known = {}  # means of the part of an epoch that the longer run continues
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
        storage.samples, self._written_iter = self.trainer.consumed_samples, storage.iter
        self._dispatcher.write(storage, keep=is_last or is_of_evaluation)
