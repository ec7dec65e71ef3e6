"""Texts with a label each, and texts with a label for each of their tokens.  L tokens."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from trainwright.data.tasks import char_labels
from trainwright.data.tasks.collators import IGNORED, SequenceLabelingDataCollator, TextPaddingDataCollator
from trainwright.data.tasks.dataset import Dataset, DatasetConfig, register_dataset
from trainwright.data.tasks.tables import Row, check_columns, files_with, raise_faults, read_rows
from trainwright.data.tasks.tokenizer import check_max_length


class TextDataset(Dataset):
    """Base of data sets whose samples are made by the preprocessor's tokenizer, and its text normalizer, if any."""

    def connect(self) -> None:
        """Give the collator the tokenizer, whose padding it uses."""
        if self.preprocessor is not None and hasattr(self.data_collator, "tokenizer"):
            self.data_collator.tokenizer = self.part("tokenizer")

    def normalized(self, text: str) -> str:
        """The text as the preprocessor's text normalizer, if it has one, makes it."""
        normalizer = getattr(self.preprocessor, "text_normalizer", None)
        return text if normalizer is None else str(normalizer(text))


@dataclass
class TextClassificationDatasetConfig(DatasetConfig):
    """What a `TextClassificationDataset` reads.

    Fields:
        id2label: the classes by id; None takes those of all splits, sorted.
        max_length: longer texts are cut behind so many tokens; None leaves that to the tokenizer.
        text_field, label_field: names of the columns.
    """

    name = "text_classification"

    id2label: Any = None
    max_length: int | None = None
    text_field: str = "text"
    label_field: str = "label"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.id2label = char_labels.checked_labels(self.id2label, type(self).__name__)
        check_max_length(self)


@register_dataset("text_classification", config_class=TextClassificationDatasetConfig)
class TextClassificationDataset(TextDataset):
    """Samples ``{"token_ids": (L,), "labels": id}`` of rows ``{"text", "label"}``: a label is a class or its id."""

    known_by = (("text", "label"),)

    def __init__(self, config: Any, split: str | None = None, preprocessor: Any = None, **overrides: Any) -> None:
        super().__init__(config, split, preprocessor, **overrides)
        self._label2id = {label: number for number, label in self.config.id2label.items()}
        self.data_collator = TextPaddingDataCollator()
        self.connect()

    def _load(self, split: str | None) -> list[Row]:
        path = self.split_file(split)
        config = self.config
        rows = read_rows(path)
        check_columns(path, rows[0], [config.text_field, config.label_field])
        if config.id2label is None:
            files = files_with(self.folder(), [config.text_field, config.label_field])
            config.id2label = classes_of(row.get(config.label_field) for file in files for row in read_rows(file))
        label2id = {label: number for number, label in config.id2label.items()}
        faults, found = [], []
        for row in rows:
            text, label = row.get(config.text_field), row.get(config.label_field)
            if not isinstance(text, str) or not text.strip():
                faults.append(f"{row.where}: the text is {'empty' if not text else repr(text)}")
            elif char_labels.id_of(label, label2id) is None:
                faults.append(f"{row.where}: {char_labels.unknown_label(label, label2id)}")
            found.append(_row(row, text=text, label=label))
        raise_faults(faults, len(rows))
        return found

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.row(index)
        text = self.normalized(row["text"])
        token_ids = self.part("tokenizer").encode(text, max_length=self.config.max_length)
        return {"token_ids": token_ids, "labels": char_labels.id_of(row["label"], self._label2id)}


@dataclass
class SequenceLabelingDatasetConfig(DatasetConfig):
    """What a `SequenceLabelingDataset` reads.

    Fields:
        id2label: the labels of tokens by id; None takes those of all splits, sorted.
        max_length: longer texts are cut behind so many tokens; None leaves that to the tokenizer.
        label_all_tokens: every piece of a word has its label; else the first piece alone, the others have -100.
        is_iob_schema: whether labels are "O", "B-...", "I-..."; None looks at them.
        tokens_field, tags_field: names of the columns; tags are looked for under "labels" and "tags".
    """

    name = "sequence_labeling"

    id2label: Any = None
    max_length: int | None = None
    label_all_tokens: bool = False
    is_iob_schema: bool | None = None
    tokens_field: str = "tokens"
    tags_field: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.id2label = char_labels.checked_labels(self.id2label, type(self).__name__)
        check_max_length(self)


@register_dataset("sequence_labeling", config_class=SequenceLabelingDatasetConfig)
class SequenceLabelingDataset(TextDataset):
    """Samples ``{"token_ids": (L,), "labels": (L,)}`` of rows ``{"tokens", "labels"}``, two lists of one length.

    Labels are -100 at special tokens, and at all pieces of a word but the first.
    """

    known_by = (("tokens",),)

    def __init__(self, config: Any, split: str | None = None, preprocessor: Any = None, **overrides: Any) -> None:
        super().__init__(config, split, preprocessor, **overrides)
        self._label2id = {label: number for number, label in self.config.id2label.items()}
        self.data_collator = SequenceLabelingDataCollator()
        self.connect()

    def _load(self, split: str | None) -> list[Row]:
        path = self.split_file(split)
        config = self.config
        rows = read_rows(path)
        tags_field = config.tags_field or ("tags" if "tags" in rows[0] and "labels" not in rows[0] else "labels")
        check_columns(path, rows[0], [config.tokens_field, tags_field])
        if config.id2label is None:
            files = files_with(self.folder(), [config.tokens_field, tags_field])
            config.id2label = classes_of(
                tag for file in files for row in read_rows(file) for tag in row.get(tags_field, [])
            )
        if config.is_iob_schema is None:
            config.is_iob_schema = all(label == "O" or label[:2] in ("B-", "I-") for label in config.id2label.values())
        label2id = {label: number for number, label in config.id2label.items()}
        found = [_row(row, tokens=row.get(config.tokens_field), labels=row.get(tags_field)) for row in rows]
        faults = [f"{row.where}: {fault}" for row in found if (fault := _labeling_fault(row, label2id))]
        raise_faults(faults, len(rows))
        return found

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.row(index)
        words = [self.normalized(token) for token in row["tokens"]]
        token_ids, numbers = self.part("tokenizer").encode_words(words, max_length=self.config.max_length)
        word_labels = [char_labels.id_of(label, self._label2id) for label in row["labels"]]
        labels, before = [], None
        for number in numbers:
            is_labeled = number is not None and (number != before or self.config.label_all_tokens)
            labels.append(word_labels[number] if is_labeled else IGNORED)
            before = number
        return {"token_ids": token_ids, "labels": labels}


def classes_of(labels: Iterable[Any]) -> dict[int, str]:
    """``id2label`` of all labels, sorted: as numbers if all are whole numbers, else as texts."""
    found = {str(label) for label in labels if label is not None}
    are_numbers = all(label.isdecimal() for label in found)
    return dict(enumerate(sorted(found, key=int if are_numbers else str)))


def _labeling_fault(row: Row, label2id: dict[str, int]) -> str | None:
    tokens, labels = row["tokens"], row["labels"]
    if not (isinstance(tokens, list) and isinstance(labels, list) and tokens):
        return "tokens and labels must be lists, with at least one token (in JSON lines, not in CSV)"
    if not all(isinstance(token, str) for token in tokens):
        return "each token must be text"
    if len(tokens) != len(labels):
        return f"has {len(tokens)} tokens and {len(labels)} labels"
    unknown = next((label for label in labels if char_labels.id_of(label, label2id) is None), None)
    return None if unknown is None else char_labels.unknown_label(unknown, label2id)


def _row(source: Row, **values: Any) -> Row:
    row = Row(values)
    row.where = source.where
    return row
