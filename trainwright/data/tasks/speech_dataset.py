"""SpeechRecognitionDataset: recordings and their transcripts.

T frames, F features, L characters.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainwright.data.errors import DataError
from trainwright.data.tasks import labels as char_labels
from trainwright.data.tasks.collators import IGNORED, SpeechRecognitionDataCollator
from trainwright.data.tasks.dataset import Dataset, DatasetConfig, register_dataset
from trainwright.data.tasks.tables import FileFinder, Row, check_columns, files_with, raise_faults, read_rows, text_of
from trainwright.data.tasks.tokenizer import check_max_length


@dataclass
class SpeechRecognitionDatasetConfig(DatasetConfig):
    """What a `SpeechRecognitionDataset` reads.

    Fields:
        id2label: the characters by id, the blank "" at 0; None takes those of all splits, sorted.
        max_length: of a text in characters; a longer one is an error. None means any.
        audio_path_column, text_column: names of the columns.
    """

    name = "speech_recognition"

    id2label: Any = None
    max_length: int | None = None
    audio_path_column: str = "audio_path"
    text_column: str = "text"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.id2label = char_labels.checked_labels(self.id2label, type(self).__name__)
        check_max_length(self)


@register_dataset("speech_recognition", config_class=SpeechRecognitionDatasetConfig)
class SpeechRecognitionDataset(Dataset):
    """Samples ``{"input_features": float32 (T, F), "labels": ids (L,)}`` of rows ``{"audio_path", "text"}``.

    Rows are checked when it is made, as those of an `OCRDataset`; sounds are looked for in ``audio/`` as well.
    """

    known_by = (("audio_path", "text"),)

    def __init__(self, config: Any, split: str | None = None, preprocessor: Any = None, **overrides: Any) -> None:
        super().__init__(config, split, preprocessor, **overrides)
        self._label2id = {label: number for number, label in self.config.id2label.items()}
        self.data_collator = SpeechRecognitionDataCollator(self._label2id.get(char_labels.BLANK, IGNORED))

    def _load(self, split: str | None) -> list[Row]:
        path = self.split_file(split)
        rows = self._rows_of(path)
        if self.config.id2label is None:
            files = files_with(self.folder(), [self.config.audio_path_column, self.config.text_column])
            texts = (row["text"] for file in files for row in self._rows_of(file))
            self.config.id2label = char_labels.labels_of(texts)
        label2id = {label: number for number, label in self.config.id2label.items()}
        finder = FileFinder(path.parent, self.folder(), "audio", is_foreign=self.is_from_hub())
        faults = []
        for row in rows:
            sound = finder.find(row["audio_path"])
            if sound is None:
                faults.append(f"{row.where}: there is no sound {row['audio_path']!r}, looked for in {finder.places}")
            elif fault := char_labels.fault_of(row["text"], label2id, self.config.max_length):
                faults.append(f"{row.where}: {fault}")
            else:
                row["audio_path"] = sound
        raise_faults(faults, len(rows))
        return rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.row(index)
        extractor = self.part("audio_feature_extractor")
        try:
            features = extractor.features_of(row["audio_path"])
        except DataError as error:
            raise DataError(f"{getattr(row, 'where', self.split)}: {error}") from error
        return {"input_features": features, "labels": [self._label2id[character] for character in row["text"]]}

    def _rows_of(self, path: Path) -> list[Row]:
        config = self.config
        rows = read_rows(path)
        check_columns(path, rows[0], [config.audio_path_column, config.text_column])
        found = []
        for row in rows:
            audio_path, text = text_of(row, config.audio_path_column), text_of(row, config.text_column)
            kept = Row(audio_path=audio_path, text=char_labels.composed(text))
            kept.where = row.where
            found.append(kept)
        return found
