"""Data sets in others: those of which a subset is a part, and those that are joined or mixed."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch.utils.data import ChainDataset, ConcatDataset, Dataset, Subset

from trainwright.base.errors import ConfigError
from trainwright.data.collate import collate

Collator = Callable[[list[Any]], Any]


def inner_datasets(dataset: Any) -> list[Any]:
    """The data sets of which one consists: none, if it has its own samples."""
    if not isinstance(dataset, Dataset):
        return []
    several = getattr(dataset, "datasets", None)
    if isinstance(several, Mapping):
        several = several.values()
    return [*several] if several else [inner] if (inner := getattr(dataset, "dataset", None)) is not None else []


def with_inner(dataset: Any) -> Iterator[Any]:
    """The data set, and all of which it consists."""
    yield dataset
    for inner in inner_datasets(dataset):
        yield from with_inner(inner)


def own_collator(dataset: Any) -> Collator | None:
    """The ``data_collator`` of a data set, or that of the data sets whose samples a subset or a joined one has."""
    own: Collator | None = getattr(dataset, "data_collator", None)
    has_their_samples = isinstance(dataset, Subset | ConcatDataset | ChainDataset)
    return common_collator(inner_datasets(dataset)) if own is None and has_their_samples else own


def common_collator(datasets: Sequence[Any]) -> Collator | None:
    """The collator of data sets that are read together; None if they have none.

    Raises:
        ConfigError: they have collators of several kinds.
    """
    kinds = {_name(found): found for found in map(own_collator, datasets)}
    if len(kinds) > 1:
        raise ConfigError(
            f"data: data sets that are read together have different collators: {', '.join(kinds)}. Pass one for all of "
            "them: data_collator= of the Trainer, or collate_fn= of a loader."
        )
    return next(iter(kinds.values()), None)


def _name(collator: Collator | None) -> str:
    return getattr(collator or collate, "__qualname__", type(collator).__name__)
