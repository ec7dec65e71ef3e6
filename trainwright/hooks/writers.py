"""Hand the run's metrics to the writers, now and then."""

from collections.abc import Sequence

from trainwright.events.writers.base import EventWriter
from trainwright.events.writers.delivery import Delivery
from trainwright.hooks.base import HookBase


class PeriodicWriter(HookBase):
    """Write every ``period`` iterations, after the last one, and at the end of training, whatever ended it.

    The writers are called beside the training, which waits for none of them until its end. What one of them raises
    ends the training at the next time that something is written.

    Stands last in the list of hooks, so that it writes what the others have put.
    """

    def __init__(self, writers: Sequence[EventWriter], period: int = 20) -> None:
        self._period = period
        self._delivery = Delivery(writers)
        self._written_results: object = None

    def before_train(self) -> None:
        if self.trainer.storage.written is None:
            self.trainer.storage.written = self.trainer.start_iter - 1
        self._written_results = self.trainer.last_eval_results

    def after_step(self) -> None:
        iteration = self.trainer.iter + 1
        if iteration % self._period == 0 or iteration == self.trainer.max_iter:
            self.trainer.storage.written = self.trainer.iter
            self._write()

    def after_train(self) -> None:
        try:
            self._write(is_last=True)  # the final evaluation
        finally:
            self._delivery.close()

    def _write(self, *, is_last: bool = False) -> None:
        results = self.trainer.last_eval_results
        is_of_evaluation, self._written_results = results is not self._written_results, results
        self._delivery.write(self.trainer.storage, must_stay=is_last or is_of_evaluation)
