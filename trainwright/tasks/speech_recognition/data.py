"""Recordings with their transcripts.

B samples, T frames, F features, L characters.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from trainwright.base.batch import IGNORED
from trainwright.tasks import labels
from trainwright.tasks.dataset import FileField, LabeledDatasetConfig, TableDataset, register_dataset
from trainwright.tasks.padding import Batch, BlankCollator, Samples, pad, pad_mask
from trainwright.tasks.tables import Row, text_of


class SpeechRecognitionDataCollator(BlankCollator):
    """``input_features`` (B, T, F) and ``attention_mask`` (B, T), and ``labels`` (B, L) padded with
    ``pad_token_id``, the blank of CTC.
    """

    def __call__(self, samples: Samples) -> Batch:
        rows = [sample["input_features"] for sample in samples]
        return {"input_features": pad(rows, 0.0), "attention_mask": pad_mask(rows), **self.labels(samples)}


@dataclass
class SpeechRecognitionDatasetConfig(LabeledDatasetConfig):
    """Settings of a `SpeechRecognitionDataset`.

    Fields:
        id2label: the characters by id, the blank "" at 0; None takes those of all splits, sorted.
        max_length: of a text in characters; a longer one is an error. None means any length.
        audio_path_column, text_column: names of the columns.
    """

    name = "speech_recognition"

    audio_path_column: str = "audio_path"
    text_column: str = "text"


@register_dataset("speech_recognition", config_class=SpeechRecognitionDatasetConfig)
class SpeechRecognitionDataset(TableDataset):
    """Samples ``{"input_features": float32 (T, F), "labels": ids (L,)}`` of rows ``{"audio_path", "text"}``.

    Rows are checked when the data set is made, as those of an `OCRDataset`. Audio files are also found in ``audio/``.
    """

    forms = ({"audio_path": "audio_path_column", "text": "text_column"},)
    file_field = FileField("audio_path", subfolder="audio", kind="audio file")

    def __init__(self, config: Any, split: str | None = None, preprocessor: Any = None, **overrides: Any) -> None:
        super().__init__(config, split, preprocessor, **overrides)
        self.data_collator = SpeechRecognitionDataCollator(self._label2id.get(labels.BLANK, IGNORED))

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.row(index)
        features = self.read_file(row, self.part("audio_feature_extractor").features_of)
        return {"input_features": features, "labels": [self._label2id[character] for character in row["text"]]}

    def _row(self, row: Row, columns: dict[str, str]) -> Row:
        text = labels.composed(labels.stripped(text_of(row, columns["text"])))
        return row.with_values(audio_path=text_of(row, columns["audio_path"]), text=text)

    def _id2label(self, rows: Iterable[Row]) -> dict[int, str]:
        return labels.id2label_of_texts(row["text"] for row in rows)

    def _fault(self, row: Row) -> str | None:
        return labels.fault_of(row["text"], self._label2id, self.config.max_length)
