"""Where in its data a loader begins."""

import logging
from typing import Any

logger = logging.getLogger("trainwright.data")


def set_position(data_loader: Any, consumed_samples: int) -> None:
    """Let a loader begin after ``consumed_samples`` of all ranks, counted over epochs.

    A loader whose batch sampler has no ``set_consumed_samples`` begins its data anew, which is a warning.
    """
    set_consumed_samples = getattr(getattr(data_loader, "batch_sampler", None), "set_consumed_samples", None)
    if set_consumed_samples is not None:
        set_consumed_samples(consumed_samples)
    elif consumed_samples:
        logger.warning(
            "The training loader %s cannot be set to a position, so this run begins its data anew instead of after %d"
            " samples. Use trainwright.data's loaders, or a batch sampler with set_consumed_samples.",
            type(data_loader).__name__,
            consumed_samples,
        )
