"""Training on iterable data sets, with or without a length."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from trainwright.config.errors import ConfigError, ConfigTypeError
from trainwright.data.collate import collate


def is_stream(dataset: Any) -> bool:
    """Whether a data set can only be iterated from its beginning."""
    return isinstance(dataset, IterableDataset) or (
        hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__")
    )


def stream_loader(
    dataset: Any,
    batch_size: int,
    *,
    drop_last: bool,
    num_workers: int,
    collator: Callable[[list[Any]], Any] | None,
) -> "DataLoader[Any]":
    """Batches of a stream, in its own order. With several workers its ``__iter__`` must yield each worker's share.

    Raises:
        ConfigTypeError: it is an iterator, which can be iterated only once.
    """
    if isinstance(dataset, Iterator):
        raise ConfigTypeError(
            f"Trainer: got a data set that is an iterator ({type(dataset).__name__}), which can be iterated only once;"
            " pass an object whose __iter__ restarts, such as a torch IterableDataset."
        )
    samples = dataset if isinstance(dataset, IterableDataset) else _Samples(dataset)
    return DataLoader(
        samples,
        batch_size,
        drop_last=drop_last,
        num_workers=num_workers,
        collate_fn=collator or getattr(dataset, "data_collator", None) or collate,
    )


class Repeated:
    """A loader of ``length`` batches that repeats a loader without a length as often as necessary."""

    def __init__(self, loader: Iterable[Any], length: int) -> None:
        self._loader = loader
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        given = 0
        while given < self._length:
            before = given
            for batch in self._loader:
                yield batch
                given += 1
                if given == self._length:
                    return
            if given == before:
                raise ConfigError("Trainer.train_dataset: it yields no sample; it must yield at least one batch.")


def with_length(loader: Any, max_steps: int | float | None) -> Any:
    """``loader``, or if it has no length, one epoch of ``max_steps`` batches of it.

    Raises:
        ConfigTypeError: neither the loader nor the configuration sets the length of the training.
    """
    try:
        len(loader)
    except TypeError as error:
        if not isinstance(max_steps, int):
            raise ConfigTypeError(
                f"Trainer.train_dataloader: {type(loader).__name__} has no length ({error}); add a __len__"
                " that counts its batches, or set the number of steps with TrainingConfig.max_steps."
            ) from error
        return Repeated(loader, max_steps)
    return loader


class _Samples(IterableDataset[Any]):
    def __init__(self, samples: Iterable[Any]) -> None:
        self._samples = samples

    def __iter__(self) -> Iterator[Any]:
        return iter(self._samples)
