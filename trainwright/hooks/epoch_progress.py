"""Progress lines of an epoch, for outputs without a terminal."""

import logging
import time
from collections.abc import Callable
from datetime import timedelta

from trainwright.hooks.base import HookBase

logger = logging.getLogger("trainwright.hooks")

_PERIOD_S = 30.0


class EpochProgress(HookBase):
    """Log a line every 30 seconds: epoch, step, loss, remaining time. Shorter epochs log none.

    ``position()`` returns the epoch, the steps done in it, and its number of steps. Between two lines an iteration
    costs one comparison: the iteration of the next line is estimated from the rate so far.
    """

    def __init__(
        self, num_epochs: int, position: Callable[[], tuple[int, int, int]], *, steps_per_update: int = 1
    ) -> None:
        self._num_epochs, self._steps_per_update = num_epochs, steps_per_update
        self._position = position
        self._next = self._last = 0  # iterations done
        self._last_time = 0.0

    def before_train(self) -> None:
        self._last = self.trainer.start_iter
        self._next, self._last_time = self._last + 1, time.monotonic()

    def after_step(self) -> None:
        if self.trainer.iter >= self._next:
            self._check_time()

    def _check_time(self) -> None:
        now, done = time.monotonic(), self.trainer.iter + 1
        seconds, iterations = now - self._last_time, done - self._last
        if seconds >= _PERIOD_S:
            self._log(seconds / iterations)
            self._last, self._last_time = done, now
        left_s = _PERIOD_S - seconds if seconds < _PERIOD_S else _PERIOD_S
        # At most twice as many as so far: the first iterations are slower than the rest.
        self._next = done + max(1, min(iterations, int(left_s * iterations / max(seconds, 1e-6))))

    def _log(self, seconds_each: float) -> None:
        epoch, step, num_steps = self._position()
        if step >= num_steps:  # the line of the completed epoch follows
            return
        logger.info(
            "[epoch %d/%d] step %d/%d (%.0f %%)%s, %s left in the epoch.",
            epoch,
            self._num_epochs,
            step,
            num_steps,
            100 * step / num_steps,
            self._loss(),
            timedelta(seconds=round((num_steps - step) / self._steps_per_update * seconds_each)),
            extra={"progress": True},
        )

    def _loss(self) -> str:
        value = self.trainer.storage.latest().get("total_loss")
        return "" if value is None else f", loss={value[0]:.4g}"
