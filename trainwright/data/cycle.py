"""Cycle through a data loader."""

import logging
from collections.abc import Iterable, Iterator
from itertools import count
from typing import Any

from trainwright.config.errors import ConfigError

logger = logging.getLogger("trainwright.data")


def cycle(data_loader: Iterable[Any]) -> Iterator[Any]:
    """The batches of ``data_loader``, repeated forever.

    Calls ``set_epoch`` of the sampler, if it has it (torch's DistributedSampler), before each epoch.

    Raises:
        ConfigError: an epoch has no batch.
    """
    log_if_workers_restart(data_loader)
    for epoch in count():
        set_epoch = getattr(getattr(data_loader, "sampler", None), "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)
        is_empty = True
        for batch in data_loader:
            is_empty = False
            yield batch
        if is_empty:
            raise ConfigError(
                f"The data loader {type(data_loader).__name__} gave no batch: its dataset is empty, or smaller than a"
                " batch and drop_last is True."
            )


def log_if_workers_restart(data_loader: Any) -> None:
    """Log a suggestion if a torch DataLoader restarts its workers in each epoch."""
    if getattr(data_loader, "num_workers", 0) and not getattr(data_loader, "persistent_workers", True):
        logger.info(
            "The given %s restarts its %d workers in each epoch; persistent_workers=True keeps them.",
            type(data_loader).__name__,
            data_loader.num_workers,
        )
