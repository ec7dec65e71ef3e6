"""Base classes of data sets: the rows of a split, read from a local folder or from the hub, and their collator."""

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import torch.utils.data

from trainwright.base.errors import ConfigError, ConfigTypeError, MissingFileError
from trainwright.checkpoint.hub import local_folder
from trainwright.config.yaml_config import YamlConfig, check_positive
from trainwright.config.yaml_file import read_mapping
from trainwright.data.collate import collate
from trainwright.data.errors import DataError
from trainwright.models.registry import Registry
from trainwright.tasks.labels import id2label_of_data
from trainwright.tasks.preprocessor import part_of_kind
from trainwright.tasks.tables import (
    FileFinder,
    Row,
    check_columns,
    columns_of,
    find_split,
    raise_faults,
    read_rows,
    split_files,
)

CONFIG_NAME = "dataset_config.yaml"

D = TypeVar("D", bound="type[Dataset]")


@dataclasses.dataclass
class DatasetConfig(YamlConfig):
    """Base of the settings of data sets: a dataclass with a class attribute ``name``, stored as a YAML file.

    Fields:
        path: the folder of the data or an id on the hub; ``:name`` at its end selects a folder in it.
        max_size: the largest number of rows, or the fraction of them as a float, rounded up. None means all.
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
        is_count, is_fraction = type(size) is int and size >= 1, type(size) is float and 0 < size <= 1
        if not (size is None or is_count or is_fraction):
            raise ConfigError(
                f"{type(self).__name__}.max_size: got {size!r}; it must be a whole number >= 1, "
                "a fraction in (0.0, 1.0], or None."
            )


class Dataset(torch.utils.data.Dataset[Any]):
    """Base of data sets. A class of your own has a config class and two methods, and is registered:

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
        config: settings; they are copied, and ``overrides`` are set in the copy.
        split: "train", "test", or another split of the data.
        preprocessor: one or several. The Trainer sets it if it is None; samples need it.

    Attributes:
        config, split, preprocessor: the arguments.
        data: the rows, the result of `_load`.
        data_collator: converts a list of samples to a batch.
    """

    config_class: ClassVar[type[DatasetConfig]] = DatasetConfig
    # Forms of rows: the config's field with the column of each field. `load` finds the class of a folder by them.
    forms: ClassVar[Sequence[Mapping[str, str]]] = ()

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
        """The rows of a split: any sequence."""
        raise NotImplementedError(f"{type(self).__name__} has no _load(split): define one that returns the rows.")

    def __getitem__(self, index: int) -> Any:
        """One sample: a function of the row (and of random numbers, which are seeded for each sample)."""
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
        """Called when the preprocessor is set, for example to set the tokenizer of the collator."""

    def row(self, index: int) -> Any:
        """The row of a sample; a negative index counts from the end.

        Raises:
            IndexError: ``index`` is out of range.
        """
        size = len(self)
        if not -size <= index < size:
            raise IndexError(f"{self!r}: has {size} samples; index {index} is out of range.")
        return self.data[index % size]

    def part(self, kind: str) -> Any:
        """The preprocessor of a ``kind`` ("image_processor", "tokenizer", ...).

        Raises:
            ConfigError: there is none; the message says what to do.
        """
        return part_of_kind(self.preprocessor, kind, type(self).__name__)

    def folder(self) -> Path:
        """The local folder of the data, downloaded from the hub if ``config.path`` is an id.

        Raises:
            MissingFileError: there is no such folder and no such id.
        """
        return dataset_folder(self.config.path, type(self).__name__)

    @classmethod
    def load(
        cls,
        path_or_id: str | os.PathLike[str],
        split: str | None = None,
        preprocessor: Any = None,
        config: DatasetConfig | None = None,
        **config_kwargs: Any,
    ) -> Self:
        """The data set in a local folder or on the hub (``owner/name``); ``path:name`` selects a folder in it.

        The class is that of ``config``, or of the folder's ``dataset_config.yaml``, or ``cls``; for ``Dataset``
        itself, the class whose columns the files have. ``config_kwargs`` set fields of the config.

        Raises:
            MissingFileError: no such folder or split. ConfigKeyError: no such field, split, column or registered name.
            DataError: rows that cannot be used.
        """
        path = os.fspath(path_or_id)
        if config is None:
            config = cls._config_in(dataset_folder(path, cls.__name__), path, split, config_kwargs)
            config_kwargs = {}
        is_own = isinstance(config, cls.config_class) and cls is not Dataset
        where = f"Dataset.load: {type(config).__name__}"
        dataset_class = cls if is_own else _registry.find(config.name, where)
        if not issubclass(dataset_class, cls):
            raise ConfigTypeError(
                f"{path}: is a {config.name!r} of class {dataset_class.__name__}, not a {cls.__name__}. Load it with "
                f"{dataset_class.__name__}.load or Dataset.load."
            )
        return dataset_class(config, split, preprocessor, **{"path": path, **config_kwargs})

    @classmethod
    def _config_in(cls, folder: Path, path: str, split: str | None, fields: dict[str, Any]) -> DatasetConfig:
        file = folder / CONFIG_NAME
        if not file.is_file():
            dataset_class = cls if cls is not Dataset else _class_by_columns(find_split(folder, split)[1], fields)
            return dataset_class.config_class.from_dict({"path": path, **fields})
        content = read_mapping(file)
        if not isinstance(content.get("name"), str):
            raise ConfigError(f"{file}: has no key 'name', the registered name of a data set, such as 'ocr'.")
        own = cls if cls.config_class.name == content["name"] else _registry.find(content["name"], str(file))
        return own.config_class.from_dict(content, source=str(file), **{"path": path, **fields})

    def __repr__(self) -> str:
        return f"{type(self).__name__}(path={self.config.path!r}, split={self.split!r})"


@dataclasses.dataclass
class LabeledDatasetConfig(DatasetConfig):
    """Base of settings of data sets with labels: ``id2label``, the labels by id, and ``max_length`` of a sample."""

    id2label: Any = None
    max_length: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.id2label = id2label_of_data(self.id2label, type(self).__name__)
        check_positive(self, "max_length", or_none=True)


@dataclasses.dataclass(frozen=True)
class FileField:
    """A field of rows that names a file, found beside the table or in ``subfolder``. ``kind`` is for messages."""

    name: str
    subfolder: str
    kind: str


class TableDataset(Dataset):
    """Base of data sets whose splits are tables. All rows are checked when the data set is made.

    A subclass maps the fields of its rows to columns of the file (`_columns`), and may convert rows (`_row`), check
    them (`_fault`) and infer ``id2label`` from them (`_id2label`).
    """

    file_field: ClassVar[FileField | None] = None

    def __init__(self, config: Any, split: str | None = None, preprocessor: Any = None, **overrides: Any) -> None:
        super().__init__(config, split, preprocessor, **overrides)
        self._infer_labels(self.data)  # for subclasses with their own `_load`

    def _columns(self, row: Row) -> dict[str, str]:
        """The column of each field. ``row`` is the file's first."""
        forms = [{name: getattr(self.config, field) for name, field in form.items()} for form in self.forms]
        return next((form for form in forms if any(column in row for column in form.values())), forms[-1])

    def _table(self, path: Path) -> list[Row]:
        return read_rows(path)

    def _is_alike(self, path: Path, columns: Collection[str]) -> bool:
        """Whether the file of another split has these columns. The folder may contain other files."""
        return set(columns) <= set(columns_of(path))

    def _row(self, row: Row, columns: dict[str, str]) -> Row | None:
        """The fields of a row of the file; None leaves the row out."""
        return row.with_values(**{name: row.get(column) for name, column in columns.items()})

    def _fault(self, row: Row) -> str | None:
        """What is wrong with a row; None if it is valid."""
        return None

    @property
    def _has_labels(self) -> bool:
        return isinstance(self.config, LabeledDatasetConfig)

    def _id2label(self, rows: Iterable[Row]) -> dict[int, str]:
        raise NotImplementedError

    def _load(self, split: str | None) -> list[Row]:
        folder = self.folder()
        self.split, path = find_split(folder, split)
        rows = self._table(path)
        if not rows:
            return []
        columns = self._columns(rows[0])
        check_columns(path, rows[0], columns.values())
        files = (file for file in split_files(folder).values() if self._is_alike(file, columns.values()))
        self._infer_labels(row for file in files for row in self._kept(self._table(file), columns))
        kept = self._kept(rows, columns)
        finder = None
        if self.file_field is not None:
            own = str(self.config.path)
            places = (own, own.rpartition(":")[0] or own)
            is_downloaded = not any(Path(place).expanduser().is_dir() for place in places)
            finder = FileFinder(path.parent, folder, self.file_field.subfolder, is_foreign=is_downloaded)
        faults = [(row.where, self._find_file(row, finder) or self._fault(row)) for row in kept]
        raise_faults([f"{where}: {fault}" for where, fault in faults if fault], len(kept))
        return kept

    def _kept(self, rows: Iterable[Row], columns: dict[str, str]) -> list[Row]:
        return [kept for row in rows if (kept := self._row(row, columns)) is not None]

    def _infer_labels(self, rows: Iterable[Row]) -> None:
        if self._has_labels and self.config.id2label is None:
            self.config.id2label = self._id2label(rows)

    @functools.cached_property
    def _label2id(self) -> dict[str, int]:
        return {label: number for number, label in (self.config.id2label or {}).items()}

    def _find_file(self, row: Row, finder: FileFinder | None) -> str | None:
        """Replace the name of a file by its absolute path; what is wrong if there is none."""
        if finder is None or self.file_field is None:
            return None
        name = row[self.file_field.name]
        path = finder.find(name)
        if path is None:
            return f"there is no {self.file_field.kind} {name!r}, looked for in {finder.places}"
        row[self.file_field.name] = path
        return None

    def read_file(self, row: Any, read: Callable[[str], Any]) -> Any:
        """``read(path)`` of the file of a row; an error names the row's place in the table."""
        assert self.file_field is not None
        try:
            return read(row[self.file_field.name])
        except DataError as error:
            raise DataError(f"{getattr(row, 'where', self.split)}: {error}") from error


class TextDataset(TableDataset):
    """Base of data sets whose samples are made by the preprocessor's tokenizer, and its text normalizer, if any."""

    collator_class: ClassVar[type[Any]]

    def __init__(self, config: Any, split: str | None = None, preprocessor: Any = None, **overrides: Any) -> None:
        super().__init__(config, split, preprocessor, **overrides)
        self.data_collator = self.collator_class()
        self.connect()

    def connect(self) -> None:
        """Give the collator the tokenizer, whose padding it uses."""
        if self.preprocessor is not None and hasattr(self.data_collator, "tokenizer"):
            self.data_collator.tokenizer = self.part("tokenizer")

    def normalized(self, text: str) -> str:
        """The text after the preprocessor's text normalizer, if it has one."""
        normalizer = getattr(self.preprocessor, "text_normalizer", None)
        return text if normalizer is None else str(normalizer(text))


_OWN = {
    "ocr": "trainwright.tasks.image2text.data",
    "speech_recognition": "trainwright.tasks.speech_recognition.data",
    "text_classification": "trainwright.tasks.text_classification.data",
    "sequence_labeling": "trainwright.tasks.sequence_labeling.data",
    "text_generation": "trainwright.tasks.text_generation.data",
}
_registry: Registry[Dataset] = Registry("dataset", DatasetConfig, _OWN)


def register_dataset(name: str, config_class: type[DatasetConfig]) -> Callable[[D], D]:
    """Class decorator: `Dataset.load` finds the class by ``name``, the ``name`` of its config class."""
    return _registry.decorator(name, config_class)


def dataset_folder(path: str | None, who: str) -> Path:
    """The folder of a config's ``path``, ``:name`` included."""
    if path is None:
        raise ConfigError(f"{who}: the config has no path; set it to the folder of the data, or to an id on the hub.")
    base, colon, name = path.rpartition(":")
    if not colon or "/" in name or "\\" in name or Path(path).is_dir():
        return local_folder(path, repo_type="dataset")
    folder = local_folder(base, repo_type="dataset")
    if not (folder / name).is_dir():
        raise MissingFileError(
            f"{path}: {folder} has no folder {name!r}; it has {sorted(p.name for p in folder.iterdir())}."
        )
    return folder / name


def _class_by_columns(file: Path, fields: Mapping[str, Any]) -> type[Dataset]:
    """The class whose config has these fields and whose columns a file has; of several, the class with most columns."""
    columns, classes = columns_of(file), list(_registry)
    able = [cls for cls in classes if fields.keys() <= cls.config_class.__dataclass_fields__.keys()] or classes
    named = [
        (cls, [fields.get(name) or getattr(cls.config_class, name) for name in form.values()])
        for cls in able
        for form in cls.forms
    ]
    forms = [([column for column in form if column], cls) for cls, form in named]
    fitting = [(form, cls) for form, cls in forms if set(form) <= set(columns)]
    if not fitting:
        known = "; ".join(f"{cls.config_class.name}: {', '.join(form)}" for form, cls in forms)
        header = " If its header is missing, write one." if file.suffix in (".csv", ".tsv") else ""
        raise ConfigError(
            f"{file}: its columns ({', '.join(columns)}) are not those of a data set without {CONFIG_NAME} ({known}). "
            f"Rename them, or write {CONFIG_NAME} with a key 'name'; it may set other columns.{header}"
        )
    return max(fitting, key=lambda pair: len(pair[0]))[1]
