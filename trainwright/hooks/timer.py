"""How long iterations take."""

import logging
import time
from datetime import timedelta

from trainwright.hooks.base import HookBase

logger = logging.getLogger("trainwright.hooks")


class IterationTimer(HookBase):
    """Put the seconds of each iteration as ``time``, and log the whole at the end.

    The first ``warmup_iter`` iterations of a run are left out: they are slower than the rest. Not so after a resume,
    where the same iterations shall have a time as without one. Hooks are timed apart: ``time`` is from this hook's
    ``before_step`` to its ``after_step``, so it stands first in the list.
    """

    def __init__(self, warmup_iter: int = 3) -> None:
        self._warmup_iter = warmup_iter
        self._step_start = 0.0
        self._train_start = 0.0
        self._steps_total = 0.0
        self._first_timed = 0

    def before_train(self) -> None:
        self._train_start = time.perf_counter()
        self._steps_total = 0.0
        self._first_timed = self._warmup_iter

    def before_step(self) -> None:
        self._step_start = time.perf_counter()

    def after_step(self) -> None:
        seconds = time.perf_counter() - self._step_start
        self._steps_total += seconds
        if self.trainer.iter >= self._first_timed:
            self.trainer.storage.put_scalar("time", seconds)

    def after_train(self) -> None:
        iterations = self.trainer.iter - self.trainer.start_iter
        if iterations <= 0:
            return
        total = time.perf_counter() - self._train_start
        logger.info(
            "Trained %d iterations in %s (%.4f s each); %s in all, %s of it outside the steps.",
            iterations,
            _clock(self._steps_total),
            self._steps_total / iterations,
            _clock(total),
            _clock(total - self._steps_total),
        )


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
