"""OCRDataset: pictures of text and what they say.

C channels, H height, W width, L characters.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainwright.config.errors import ConfigError
from trainwright.data.errors import DataError
from trainwright.data.tasks import labels as char_labels
from trainwright.data.tasks.collators import IGNORED, CharLevelOCRDataCollator, ImageCaptioningDataCollator
from trainwright.data.tasks.dataset import Dataset, DatasetConfig, register_dataset
from trainwright.data.tasks.tables import FileFinder, Row, check_columns, files_with, raise_faults, read_rows, text_of
from trainwright.data.tasks.tokenizer import check_max_length

_SPLIT_TYPES = ("char_split", "tokenize")


@dataclass
class OCRDatasetConfig(DatasetConfig):
    """What an `OCRDataset` reads.

    Fields:
        id2label: the characters by id, the blank "" at 0; None takes those of all splits, sorted.
        max_length: of a label in characters (or tokens); a longer one is an error. None means any.
        reverse_digits: each run of digits is learned the other way round, as a picture that is mirrored shows it.
        reverse_text: the whole label is.
        text_split_type: "char_split" for ids by ``id2label``, "tokenize" for those of the preprocessor's tokenizer.
        invalid_characters: rows whose label has one of these are left out.
        text_column, images_paths_column: names of the columns.
    """

    name = "ocr"

    id2label: Any = None
    max_length: int | None = None
    reverse_digits: bool = False
    reverse_text: bool = False
    text_split_type: str = "char_split"
    invalid_characters: Sequence[str] | None = None
    text_column: str = "label"
    images_paths_column: str = "image_path"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.id2label = char_labels.checked_labels(self.id2label, type(self).__name__)
        check_max_length(self)
        if self.text_split_type not in _SPLIT_TYPES:
            raise ConfigError(
                f"{type(self).__name__}.text_split_type: got {self.text_split_type!r}; "
                f"{' or '.join(_SPLIT_TYPES)} is allowed."
            )


@register_dataset("ocr", config_class=OCRDatasetConfig)
class OCRDataset(Dataset):
    """Samples ``{"pixel_values": float32 (C, H, W), "labels": ids (L,)}`` of rows ``{"image_path", "label"}``.

    Rows are checked when it is made: the picture is there, the label is not empty, not too long, and has only known
    characters. The pictures' content is not read before a sample is.

    Raises:
        DataError: rows that cannot be used, the first five with file and line.
    """

    known_by = (("image_path", "label"),)

    def __init__(
        self, config: OCRDatasetConfig, split: str | None = None, preprocessor: Any = None, **overrides: Any
    ) -> None:
        super().__init__(config, split, preprocessor, **overrides)
        if self.config.id2label is None and not self._is_tokenized:
            self.config.id2label = char_labels.labels_of(row["label"] for row in self.data)
        self._label2id = {label: number for number, label in (self.config.id2label or {}).items()}
        blank = self._label2id.get(char_labels.BLANK, IGNORED)
        self.data_collator = ImageCaptioningDataCollator() if self._is_tokenized else CharLevelOCRDataCollator(blank)

    def _load(self, split: str | None) -> list[Row]:
        """Rows ``{"image_path", "label"}``: absolute paths, and labels as they are learned."""
        path = self.split_file(split)
        rows = self._rows_of(path)
        if self.config.id2label is None and not self._is_tokenized:
            files = files_with(self.folder(), self._columns)
            texts = (row["label"] for file in files for row in self._rows_of(file))
            self.config.id2label = char_labels.labels_of(texts)
        self._check(rows, path)
        return rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.row(index)
        processor = self.part("image_processor")
        try:
            pixel_values = processor(row["image_path"], return_tensors="torch")["pixel_values"][0]
        except DataError as error:
            raise DataError(f"{getattr(row, 'where', self.split)}: {error}") from error
        return {"pixel_values": pixel_values, "labels": self._ids(row["label"])}

    @property
    def _columns(self) -> list[str]:
        return [self.config.images_paths_column, self.config.text_column]

    @property
    def _is_tokenized(self) -> bool:
        return bool(self.config.text_split_type == "tokenize")

    def _ids(self, label: str) -> list[int]:
        if not self._is_tokenized:
            return [self._label2id[character] for character in label]
        ids: list[int] = self.part("tokenizer").encode(label, max_length=self.config.max_length)
        return ids

    def _rows_of(self, path: Path) -> list[Row]:
        """A file's rows, without those that ``invalid_characters`` leave out; pictures as they are written there."""
        config = self.config
        rows = read_rows(path)
        check_columns(path, rows[0], self._columns)
        found = []
        for row in rows:
            label = char_labels.composed(text_of(row, config.text_column))
            if any(character in label for character in config.invalid_characters or ()):
                continue
            label = label[::-1] if config.reverse_text else label
            label = char_labels.reverse_digits(label) if config.reverse_digits else label
            kept = Row(image_path=text_of(row, config.images_paths_column), label=label)
            kept.where = row.where
            found.append(kept)
        return found

    def _check(self, rows: list[Row], path: Path) -> None:
        """Find each row's picture, and hold its label to the known characters."""
        label2id = {label: number for number, label in (self.config.id2label or {}).items()}
        finder = FileFinder(path.parent, self.folder(), "images", is_foreign=self.is_from_hub())
        faults = []
        for row in rows:
            picture = finder.find(row["image_path"])
            if picture is None:
                faults.append(f"{row.where}: there is no picture {row['image_path']!r}, looked for in {finder.places}")
            elif fault := self._fault(row["label"], label2id):
                faults.append(f"{row.where}: {fault}")
            else:
                row["image_path"] = picture
        raise_faults(faults, len(rows))

    def _fault(self, label: str, label2id: dict[str, int]) -> str | None:
        if self._is_tokenized:
            return None if label else "the label is empty"
        return char_labels.fault_of(label, label2id, self.config.max_length)
