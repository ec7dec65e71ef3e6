"""A loader that is begun again whenever it ends."""

from collections.abc import Iterable, Iterator
from itertools import count
from typing import Any

from trainwright.config.errors import ConfigError


def endless(data_loader: Iterable[Any]) -> Iterator[Any]:
    """The batches of ``data_loader``, over and over.

    A sampler with ``set_epoch`` (torch's DistributedSampler) is told the number of each round.

    Raises:
        ConfigError: a round gave no batch.
    """
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
