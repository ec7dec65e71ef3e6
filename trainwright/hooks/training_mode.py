"""Warn about training in evaluation mode: without dropout, and with fixed running statistics."""

import logging
from typing import Any

logger = logging.getLogger("trainwright.hooks")


class TrainingMode:
    """Called with a trainer after some of its steps, it warns once if the model is in evaluation mode.

    A trainer sets training mode before its first step, and evaluations restore the mode. So this finds a user's step or
    callback that calls ``model.eval()``, and models of a user's own loop.
    """

    def __init__(self) -> None:
        self._is_logged = False

    def __call__(self, trainer: Any) -> None:
        model = getattr(trainer, "model", None)
        if self._is_logged or getattr(model, "training", True):
            return
        self._is_logged = True
        logger.warning(
            "After iteration %d: %s is trained in evaluation mode (no dropout, fixed running statistics)."
            " Call model.train() before the training, and after every model.eval() of your own.",
            trainer.iter + 1, type(model).__name__,
        )  # fmt: skip
