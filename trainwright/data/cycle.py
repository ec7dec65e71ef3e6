"""A loader that is begun again whenever it ends."""

import logging
from collections.abc import Iterable, Iterator
from itertools import count
from typing import Any

from trainwright.config.errors import ConfigError

logger = logging.getLogger("trainwright.data")


def endless(data_loader: Iterable[Any]) -> Iterator[Any]:
    """The batches of ``data_loader``, over and over.

    A sampler with ``set_epoch`` (torch's DistributedSampler) is told the number of each round.

    Raises:
        ConfigError: a round gave no batch.
    """
    tell_if_workers_start_anew(data_loader)
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
                " batch while incomplete batches are dropped."
            )


def tell_if_workers_start_anew(data_loader: Any) -> None:
    """Log how to keep the workers of a torch DataLoader that is begun again for each epoch, if they are not kept."""
    if getattr(data_loader, "num_workers", 0) and not getattr(data_loader, "persistent_workers", True):
        logger.info(
            "The given %s starts its %d workers anew for each epoch; persistent_workers=True keeps them.",
            type(data_loader).__name__,
            data_loader.num_workers,
        )
