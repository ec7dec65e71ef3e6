"""Hand the run's metrics to the writers, now and then."""

import logging
import math
from collections.abc import Sequence

from trainwright.events.writers.base import EventWriter
from trainwright.hooks.base import HookBase

logger = logging.getLogger("trainwright.hooks")


class PeriodicWriter(HookBase):
    """Write every ``period`` iterations, after the last one, and at the end of training, whatever ended it.

    Stands last in the list of hooks, so that it writes what the others have put. A loss that is not finite is warned of
    once.
    """

    def __init__(self, writers: Sequence[EventWriter], period: int = 20) -> None:
        self._writers = list(writers)
        self._period = period
        self._warned = False

    def after_step(self) -> None:
        iteration = self.trainer.iter + 1
        if iteration % self._period == 0 or iteration == self.trainer.max_iter:
            self._write()

    def after_train(self) -> None:
        self._write()  # the final evaluation
        for writer in self._writers:
            writer.close()

    def _write(self) -> None:
        if not self._warned:
            self._warn_of_non_finite_losses()
        for writer in self._writers:
            writer.write()  # of the current storage, the trainer's

    def _warn_of_non_finite_losses(self) -> None:
        for name, (value, iteration) in self.trainer.storage.latest().items():
            if "loss" in name and not math.isfinite(value):
                self._warned = True
                logger.warning(
                    "%s is %s in iteration %d, so the weights may be spoilt since some iteration before it, and so are"
                    " the checkpoints saved since. A smaller learning rate or clipped gradients may help.",
                    name,
                    value,
                    iteration,
                )
                return
