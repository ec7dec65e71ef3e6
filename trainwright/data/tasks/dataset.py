"""The Dataset contract: rows of a split, read from a folder here or on the hub, and how they become a batch."""

import dataclasses
import logging
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import torch.utils.data

from trainwright.checkpoint.hub import local_folder
from trainwright.config.errors import ConfigError, ConfigTypeError, MissingFileError
from trainwright.config.yaml_config import YamlConfig
from trainwright.config.yaml_file import read_mapping
from trainwright.data.collate import collate
from trainwright.data.tasks.preprocessor import part_of_kind
from trainwright.data.tasks.registry import Registry
from trainwright.data.tasks.tables import columns_of, find_split

logger = logging.getLogger("trainwright.data")

CONFIG_NAME = "dataset_config.yaml"

D = TypeVar("D", bound="type[Dataset]")


@dataclasses.dataclass
class DatasetConfig(YamlConfig):
    """Base of data sets' settings: a dataclass with a class attribute ``name``, kept as ``dataset_config.yaml``.

    Fields:
        path: the data's folder, an id on the hub, or either with ``:name`` of a folder in it.
        max_size: at most so many rows; a fraction below 1.0 is that share of them, rounded up. None means all.
    """

    config_type: ClassVar[str] = "dataset"
    filename: ClassVar[str] = CONFIG_NAME
    ignored_keys: ClassVar[frozenset[str]] = frozenset({"task"})

    path: str | None = None
    max_size: int | float | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.path, os.PathLike):
            self.path = os.fspath(self.path)
        size = self.max_size
        is_count, is_share = type(size) is int and size >= 1, type(size) is float and 0 < size <= 1
        if not (size is None or is_count or is_share):
            raise ConfigError(
                f"{type(self).__name__}.max_size: got {size!r}; it must be a whole number >= 1, "
                "a share in (0.0, 1.0], or None."
            )


class Dataset(torch.utils.data.Dataset[Any]):
    """Base of data sets. One of your own has a config class and two methods, and is registered by its name:

    >>> @dataclasses.dataclass
    ... class SquaresConfig(DatasetConfig):
    ...     name = "squares"
    ...     largest: int = 3
    >>> @register_dataset("squares", config_class=SquaresConfig)
    ... class Squares(Dataset):
    ...     def _load(self, split):
    ...         return list(range(self.config.largest + 1))
    ...     def __getitem__(self, index):
    ...         return {"inputs": self.data[index], "labels": self.data[index] ** 2}
    >>> Squares(SquaresConfig(largest=5), max_size=4)[3]
    {'inputs': 3, 'labels': 9}

    Args:
        config: settings; a copy is kept, in which ``overrides`` are set.
        split: "train", "test" or any other that there is.
        preprocessor: one or several; None until samples are read, and set by the Trainer.

    Attributes:
        config, split, preprocessor: as given.
        data: the rows, what `_load` gave.
        data_collator: makes a batch of a list of samples.
    """

    config_class: ClassVar[type[DatasetConfig]] = DatasetConfig
    known_by: ClassVar[Sequence[Sequence[str]]] = ()  # columns, or others, by which `load` knows files without a config

    def __init__(self, config: Any, split: str | None = None, preprocessor: Any = None, **overrides: Any) -> None:
        if not isinstance(config, self.config_class):
            raise ConfigTypeError(
                f"{type(self).__name__}: config must be a {self.config_class.__name__}; got {type(config).__name__}. "
                f"{type(self).__name__}.load(path) makes one."
            )
        self.config: Any = type(config).from_dict(config.to_dict(), **overrides)
        self.split = split
        self.data_collator: Any = collate
        self._preprocessor = preprocessor
        self.data: Any = self._load(split)
        if not len(self.data):
            raise ConfigError(f"{self!r}: has no rows.")

    def _load(self, split: str | None) -> Any:
        """The rows of a split: anything with ``len`` and whole-number indices."""
        raise NotImplementedError(f"{type(self).__name__} has no _load(split): write one that returns the rows.")

    def __getitem__(self, index: int) -> Any:
        """One sample: a function of the row alone (and of random numbers, which are seeded for each sample)."""
        raise NotImplementedError(f"{type(self).__name__} has no __getitem__(index).")

    def __len__(self) -> int:
        size, rows = self.config.max_size, len(self.data)
        if size is None:
            return rows
        # Rounded first: 0.07 of 100 rows are 7, not ceil(7.000000000000001).
        return min(rows, math.ceil(round(size * rows, 6)) if isinstance(size, float) else size)

    @property
    def preprocessor(self) -> Any:
        return self._preprocessor

    @preprocessor.setter
    def preprocessor(self, preprocessor: Any) -> None:
        self._preprocessor = preprocessor
        self.connect()

    def connect(self) -> None:
        """What a new preprocessor changes, for example the collator's tokenizer. Here nothing."""

    def row(self, index: int) -> Any:
        """The row of a sample; an index from the end may be negative.

        Raises:
            IndexError: there is none.
        """
        size = len(self)
        if not -size <= index < size:
            raise IndexError(f"{self!r}: has {size} samples; there is none at {index}.")
        return self.data[index % size]

    def part(self, kind: str) -> Any:
        """The ``kind`` ("image_processor", "tokenizer", ...) of preprocessor that samples need.

        Raises:
            ConfigError: there is none; says what to do.
        """
        return part_of_kind(self.preprocessor, kind, type(self).__name__)

    def folder(self) -> Path:
        """The folder of the data on this machine, fetched from the hub if ``config.path`` is an id.

        Raises:
            MissingFileError: neither is there.
        """
        return dataset_folder(self.config.path, type(self).__name__)

    def is_from_hub(self) -> bool:
        """Whether the data was fetched, and is not a folder of the user's."""
        path = str(self.config.path)
        without_name = path.rpartition(":")[0] or path
        return not any(Path(place).expanduser().is_dir() for place in (path, without_name))

    def split_file(self, split: str | None) -> Path:
        """The file of a split in `folder`."""
        self.split, path = find_split(self.folder(), split)
        return path

    @classmethod
    def load(
        cls,
        path_or_id: str | os.PathLike[str],
        split: str | None = None,
        preprocessor: Any = None,
        config: DatasetConfig | None = None,
        **config_kwargs: Any,
    ) -> Self:
        """The data set in a folder here or on the hub (``owner/name``), or with ``path:name`` in a folder of it.

        The class is that of ``config``, else of the folder's ``dataset_config.yaml``, else ``cls``; for ``Dataset``
        itself, the one whose columns the files have. ``config_kwargs`` set fields of the config.

        Raises:
            MissingFileError: no such folder or split. ConfigKeyError: no such field, split, column or registered name.
            DataError: rows that cannot be used.
        """
        path = os.fspath(path_or_id)
        if config is None:
            config = cls._config_in(dataset_folder(path, cls.__name__), path, split, config_kwargs)
            config_kwargs = {}
        dataset_class = cls if isinstance(config, cls.config_class) and cls is not Dataset else _class_of(config)
        if not issubclass(dataset_class, cls):
            raise ConfigTypeError(
                f"{path}: is a {config.name!r}, of class {dataset_class.__name__}, and no {cls.__name__}. Load it by "
                f"{dataset_class.__name__}.load or Dataset.load."
            )
        return dataset_class(config, split, preprocessor, **{"path": path, **config_kwargs})

    @classmethod
    def _config_in(cls, folder: Path, path: str, split: str | None, fields: dict[str, Any]) -> DatasetConfig:
        file = folder / CONFIG_NAME
        if not file.is_file():
            dataset_class = cls if cls is not Dataset else _class_by_columns(find_split(folder, split)[1])
            return dataset_class.config_class.from_dict({"path": path, **fields})
        content = read_mapping(file)
        if not isinstance(content.get("name"), str):
            raise ConfigError(f"{file}: has no key 'name', the registered name of a data set, such as 'ocr'.")
        own = cls if cls.config_class.name == content["name"] else _registry.find(content["name"], str(file))
        return own.config_class.from_dict(content, source=str(file), **{"path": path, **fields})

    def __repr__(self) -> str:
        return f"{type(self).__name__}(path={self.config.path!r}, split={self.split!r})"


_OWN = {
    "ocr": "trainwright.data.tasks.ocr_dataset",
    "speech_recognition": "trainwright.data.tasks.speech_dataset",
    "text_classification": "trainwright.data.tasks.text_datasets",
    "sequence_labeling": "trainwright.data.tasks.text_datasets",
    "text_generation": "trainwright.data.tasks.text_datasets",
}
_registry: Registry[Dataset] = Registry("dataset", DatasetConfig, _OWN)


def register_dataset(name: str, config_class: type[DatasetConfig]) -> Callable[[D], D]:
    """Class decorator: `Dataset.load` finds the class by ``name``, which is its config class's ``name`` too."""
    return _registry.decorator(name, config_class)


def dataset_folder(path: str | None, who: str) -> Path:
    """The folder that a config's ``path`` names, ``:name`` included."""
    if path is None:
        raise ConfigError(f"{who}: the config has no path; give it the data's folder, or an id on the hub.")
    base, colon, name = path.rpartition(":")
    if not colon or "/" in name or "\\" in name or Path(path).is_dir():
        return local_folder(path, repo_type="dataset")
    folder = local_folder(base, repo_type="dataset")
    if not (folder / name).is_dir():
        raise MissingFileError(
            f"{path}: {folder} has no folder {name!r}; it has {sorted(p.name for p in folder.iterdir())}."
        )
    return folder / name


def _class_of(config: DatasetConfig) -> type[Dataset]:
    return _registry.find(config.name, f"Dataset.load: {type(config).__name__}")


def _class_by_columns(file: Path) -> type[Dataset]:
    """The class whose columns a file has; of several the one with most."""
    columns = columns_of(file)
    forms = [(form, cls) for cls in _registry for form in cls.known_by]
    fitting = [(form, cls) for form, cls in forms if set(form) <= set(columns)]
    if not fitting:
        known = "; ".join(f"{cls.config_class.name}: {', '.join(form)}" for form, cls in forms)
        raise ConfigError(
            f"{file}: its columns ({', '.join(columns)}) are not those of a data set without {CONFIG_NAME} ({known}). "
            f"Rename them, or write {CONFIG_NAME}, which has a key 'name' and may say other columns."
        )
    return max(fitting, key=lambda pair: len(pair[0]))[1]
