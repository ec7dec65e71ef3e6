"""Average the weights during a training."""

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

from trainwright.hooks.base import HookBase, has_failed
from trainwright.optim.weight_average import WeightAverage

logger = logging.getLogger("trainwright.hooks")


class WeightAveraging(HookBase):
    """Adds the weights to ``average`` after each update for which ``is_due()`` is true; None: after each one.

    The model holds the averaged weights after the training, and its own during the steps.

    Args:
        at_end: called with the average before the last checkpoint and evaluation, for example to compute the statistics
            of batch norms.
    """

    slot = "step"

    def __init__(
        self,
        average: WeightAverage,
        is_due: Callable[[], bool] | None = None,
        *,
        at_end: Callable[[WeightAverage], None] | None = None,
    ) -> None:
        self._average, self._is_due, self._at_end = average, is_due, at_end
        self.changes_final_weights = at_end is not None

    def before_train(self) -> None:
        self._average.restore()

    def after_step(self) -> None:
        if self._is_due is None or self._is_due():
            self._average.update()

    def after_train(self) -> None:
        if self._at_end is not None and not has_failed(self.trainer):
            self._at_end(self._average)

    def after_end(self) -> None:
        self._average.apply()


def averaging_hook(
    average: WeightAverage | None,
    ema: Mapping[str, Any] | None,
    is_due: Callable[[int, int], bool],
    update_statistics: Callable[[WeightAverage], None],
    total_steps: int,
) -> WeightAveraging | None:
    """The hook for ``average``, by the settings ``ema`` if there are any, of a run of ``total_steps`` steps.

    ``is_due(start, every)``: whether the steps so far are more than ``start`` and a multiple of ``every``.
    """
    if average is None or ema is None:
        return None if average is None else WeightAveraging(average)
    given = ema.get("start", 0), ema.get("every", 1)
    start, every = (math.ceil(one * total_steps) if isinstance(one, float) else one for one in given)
    if start >= total_steps - total_steps % every:
        logger.warning(
            "ema: with start=%s and every=%s nothing is averaged in %d steps. Give smaller numbers, or"
            " fractions such as 0.75 and 0.01.", *given, total_steps,
        )  # fmt: skip
    due = (lambda: is_due(start, every)) if start or every > 1 else None
    # The statistics of an exponential average are those of the latest weights, which are close to the average.
    return WeightAveraging(average, due, at_end=update_statistics if ema.get("average") == "equal" else None)
