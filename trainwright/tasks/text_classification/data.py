"""Text classification: a label for each text.  L tokens."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from trainwright.tasks import labels
from trainwright.tasks.dataset import LabeledDatasetConfig, TextDataset, register_dataset
from trainwright.tasks.padding import Batch, Samples, TextCollator
from trainwright.tasks.tables import Row


class TextPaddingDataCollator(TextCollator):
    """``token_ids`` and ``attention_mask`` (B, L), and ``labels`` (B,), one per text."""

    def __call__(self, samples: Samples) -> Batch:
        batch = self.texts(samples)
        if "labels" in samples[0]:
            batch["labels"] = torch.as_tensor([sample["labels"] for sample in samples], device="cpu")
        return batch


@dataclass
class TextClassificationDatasetConfig(LabeledDatasetConfig):
    """Settings of a `TextClassificationDataset`.

    Fields:
        id2label: the classes by id; None takes those of all splits, sorted.
        max_length: longer texts are truncated to this number of tokens; None means the tokenizer's.
        text_field, label_field: names of the columns.
    """

    name = "text_classification"

    text_field: str = "text"
    label_field: str = "label"


@register_dataset("text_classification", config_class=TextClassificationDatasetConfig)
class TextClassificationDataset(TextDataset):
    """Samples ``{"token_ids": (L,), "labels": id}`` of rows ``{"text", "label"}``: a label is a class or its id."""

    forms = ({"text": "text_field", "label": "label_field"},)
    collator_class = TextPaddingDataCollator

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.row(index)
        text = self.normalized(row["text"])
        token_ids = self.part("tokenizer").encode(text, max_length=self.config.max_length)
        return {"token_ids": token_ids, "labels": labels.known_id(row["label"], self._label2id)}

    def _id2label(self, rows: Iterable[Row]) -> dict[int, str]:
        return labels.classes_of((row["label"] for row in rows), repr(self))

    def _fault(self, row: Row) -> str | None:
        text, label = row["text"], row["label"]
        if not isinstance(text, str) or not text.strip():
            return f"the text is {'empty' if not text else repr(text)}"
        return labels.class_fault(label, self._label2id)
