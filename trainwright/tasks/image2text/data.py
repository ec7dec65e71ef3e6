"""Images of text with their transcripts.

B samples, C channels, H height, W width, L characters.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainwright.base.batch import IGNORED
from trainwright.base.errors import ConfigError
from trainwright.data.errors import DataError
from trainwright.tasks import labels
from trainwright.tasks.dataset import FileField, LabeledDatasetConfig, TableDataset, register_dataset
from trainwright.tasks.padding import Batch, BlankCollator, Samples, pad
from trainwright.tasks.tables import Row, text_of

_SPLIT_TYPES = ("char_split", "tokenize")


class CharLevelOCRDataCollator(BlankCollator):
    """``pixel_values`` (B, C, H, W) and ``labels`` (B, L), padded with ``pad_token_id``, the blank of CTC.

    Raises:
        DataError: images have different sizes.
    """

    def __call__(self, samples: Samples) -> Batch:
        return {"pixel_values": _images(samples), **self.labels(samples)}


class ImageCaptioningDataCollator:
    """``pixel_values`` (B, C, H, W) and ``labels`` (B, L), padded with -100."""

    def __call__(self, samples: Samples) -> Batch:
        return {"pixel_values": _images(samples), "labels": pad([s["labels"] for s in samples], IGNORED)}


@dataclass
class OCRDatasetConfig(LabeledDatasetConfig):
    """Settings of an `OCRDataset`.

    Fields:
        id2label: the characters by id, the blank "" at 0; None takes those of all splits, sorted.
        max_length: of a label in characters (or tokens); a longer one is an error. None means any length.
        reverse_digits: reverse each run of digits of a label, as a mirrored image shows it.
        reverse_text: reverse the complete label.
        text_split_type: "char_split" for ids from ``id2label``, "tokenize" for those of the preprocessor's tokenizer.
        invalid_characters: rows whose label has one of these are left out.
        text_column, images_paths_column: names of the columns.
    """

    name = "ocr"

    reverse_digits: bool = False
    reverse_text: bool = False
    text_split_type: str = "char_split"
    invalid_characters: Sequence[str] | None = None
    text_column: str = "label"
    images_paths_column: str = "image_path"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.text_split_type not in _SPLIT_TYPES:
            raise ConfigError(
                f"{type(self).__name__}.text_split_type: got {self.text_split_type!r}; "
                f"{' or '.join(_SPLIT_TYPES)} is allowed."
            )


@register_dataset("ocr", config_class=OCRDatasetConfig)
class OCRDataset(TableDataset):
    """Samples ``{"pixel_values": float32 (C, H, W), "labels": ids (L,)}`` of rows ``{"image_path", "label"}``.

    Rows are checked when the data set is made: the image exists, the label is not empty, not too long, and has only
    known characters. The content of an image is read with its sample.

    Raises:
        DataError: rows that cannot be used, the first five with file and line.
    """

    forms = ({"image_path": "images_paths_column", "label": "text_column"},)
    file_field = FileField("image_path", subfolder="images", kind="image")

    def __init__(
        self, config: OCRDatasetConfig, split: str | None = None, preprocessor: Any = None, **overrides: Any
    ) -> None:
        super().__init__(config, split, preprocessor, **overrides)
        blank = self._label2id.get(labels.BLANK, IGNORED)
        self.data_collator = ImageCaptioningDataCollator() if self._is_tokenized else CharLevelOCRDataCollator(blank)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.row(index)
        processor = self.part("image_processor")
        pixel_values = self.read_file(row, lambda path: processor(path, return_tensors="torch")["pixel_values"][0])
        return {"pixel_values": pixel_values, "labels": self._ids(row["label"])}

    @property
    def _is_tokenized(self) -> bool:
        return bool(self.config.text_split_type == "tokenize")

    def _ids(self, label: str) -> list[int]:
        if not self._is_tokenized:
            return [self._label2id[character] for character in label]
        ids: list[int] = self.part("tokenizer").encode(label, max_length=self.config.max_length)
        return ids

    def _row(self, row: Row, columns: dict[str, str]) -> Row | None:
        """Without ``invalid_characters``, and reversed as the config says."""
        config = self.config
        label = labels.composed(labels.stripped(text_of(row, columns["label"])))
        if any(character in label for character in config.invalid_characters or ()):
            return None
        label = label[::-1] if config.reverse_text else label
        label = labels.reverse_digits(label) if config.reverse_digits else label
        return row.with_values(image_path=text_of(row, columns["image_path"]), label=label)

    @property
    def _has_labels(self) -> bool:
        return not self._is_tokenized

    def _id2label(self, rows: Iterable[Row]) -> dict[int, str]:
        return labels.id2label_of_texts(row["label"] for row in rows)

    def _fault(self, row: Row) -> str | None:
        if self._is_tokenized:
            return None if row["label"] else "the label is empty"
        return labels.fault_of(row["label"], self._label2id, self.config.max_length)


def _images(samples: Samples) -> Tensor:
    images = [torch.as_tensor(sample["pixel_values"], device="cpu") for sample in samples]
    if len({image.shape for image in images}) > 1:
        shapes = sorted({tuple(image.shape) for image in images})
        raise DataError(
            f"pixel_values: images of one batch have the shapes (channels, height, width) {shapes}; set "
            "size=(width, height) of the image processor, which resizes them."
        )
    return torch.stack(images)
