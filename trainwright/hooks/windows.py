"""Follow a schedule of the micro-batches of an update."""

import logging
from collections.abc import Callable

from trainwright.config.windows import Windows
from trainwright.hooks.base import HookBase

logger = logging.getLogger("trainwright.hooks")


class WindowSchedule(HookBase):
    """Sets the samples of each iteration, ``samples_of(micro_batches)``, and logs when their number changes."""

    slot = "prepare"

    def __init__(self, windows: Windows, samples_of: Callable[[int], int]) -> None:
        self._windows, self._samples_of = windows, samples_of
        self._length = 0  # the micro-batches of the latest iteration

    def before_train(self) -> None:
        self._length = 0

    def before_step(self) -> None:
        trainer, before = self.trainer, self._length
        self._length = length = self._windows.at(trainer.iter)
        if length == before:
            return
        trainer.samples_per_iter = self._samples_of(length)
        if before and not trainer.is_copy:
            logger.info("From iteration %d on an update has %d batches (before: %d).", trainer.iter + 1, length, before)
