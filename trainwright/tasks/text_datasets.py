"""Data sets of texts: a label for each text, a label for each token, and texts to generate.  L tokens."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from trainwright.config.yaml_config import check_positive
from trainwright.tasks import labels
from trainwright.tasks.collators import (
    IGNORED,
    SequenceLabelingDataCollator,
    TextGenerationDataCollator,
    TextPaddingDataCollator,
)
from trainwright.tasks.dataset import DatasetConfig, LabeledDatasetConfig, TableDataset, register_dataset
from trainwright.tasks.tables import Row, read_text

_NO_LIMIT = 2**31 - 1


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

    known_by = (("text", "label"),)
    collator_class = TextPaddingDataCollator

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.row(index)
        text = self.normalized(row["text"])
        token_ids = self.part("tokenizer").encode(text, max_length=self.config.max_length)
        return {"token_ids": token_ids, "labels": labels.id_of(row["label"], self._label2id)}

    def _columns(self, row: Row) -> dict[str, str]:
        return {"text": self.config.text_field, "label": self.config.label_field}

    def _id2label(self, rows: Iterable[Row]) -> dict[int, str]:
        return labels.classes_of(row["label"] for row in rows)

    def _fault(self, row: Row) -> str | None:
        text, label = row["text"], row["label"]
        if not isinstance(text, str) or not text.strip():
            return f"the text is {'empty' if not text else repr(text)}"
        return labels.unknown_label(label, self._label2id) if labels.id_of(label, self._label2id) is None else None


@dataclass
class SequenceLabelingDatasetConfig(LabeledDatasetConfig):
    """Settings of a `SequenceLabelingDataset`.

    Fields:
        id2label: the labels of tokens by id; None takes those of all splits, sorted.
        max_length: longer texts are truncated to this number of tokens; None means the tokenizer's.
        label_all_tokens: every piece of a word has its label; otherwise only the first piece, the others have -100.
        is_iob_schema: whether labels are "O", "B-...", "I-..."; None infers it from the labels.
        tokens_field, tags_field: names of the columns; None finds the tags under "labels" or "tags".
    """

    name = "sequence_labeling"

    label_all_tokens: bool = False
    is_iob_schema: bool | None = None
    tokens_field: str = "tokens"
    tags_field: str | None = None


@register_dataset("sequence_labeling", config_class=SequenceLabelingDatasetConfig)
class SequenceLabelingDataset(TextDataset):
    """Samples ``{"token_ids": (L,), "labels": (L,)}`` of rows ``{"tokens", "labels"}``, two lists of one length.

    Labels are -100 at special tokens, and at all pieces of a word but the first.
    """

    known_by = (("tokens",),)
    collator_class = SequenceLabelingDataCollator

    def __init__(self, config: Any, split: str | None = None, preprocessor: Any = None, **overrides: Any) -> None:
        super().__init__(config, split, preprocessor, **overrides)
        if self.config.is_iob_schema is None:
            self.config.is_iob_schema = all(label == "O" or label[:2] in ("B-", "I-") for label in self._label2id)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.row(index)
        words = [self.normalized(token) for token in row["tokens"]]
        token_ids, numbers = self.part("tokenizer").encode_words(words, max_length=self.config.max_length)
        word_labels = [labels.id_of(label, self._label2id) for label in row["labels"]]
        token_labels, before = [], None
        for number in numbers:
            is_labeled = number is not None and (number != before or self.config.label_all_tokens)
            token_labels.append(word_labels[number] if is_labeled else IGNORED)
            before = number
        return {"token_ids": token_ids, "labels": token_labels}

    def _columns(self, row: Row) -> dict[str, str]:
        tags_field = self.config.tags_field or ("tags" if "tags" in row and "labels" not in row else "labels")
        return {"tokens": self.config.tokens_field, "labels": tags_field}

    def _id2label(self, rows: Iterable[Row]) -> dict[int, str]:
        return labels.classes_of(tag for row in rows for tag in row["labels"] or ())

    def _fault(self, row: Row) -> str | None:
        tokens, tags = row["tokens"], row["labels"]
        if not (isinstance(tokens, list) and isinstance(tags, list) and tokens):
            return "tokens and labels must be lists, with at least one token (in JSON lines, not in CSV)"
        if not all(isinstance(token, str) for token in tokens):
            return "each token must be text"
        if len(tokens) != len(tags):
            return f"has {len(tokens)} tokens and {len(tags)} labels"
        unknown = next((label for label in tags if labels.id_of(label, self._label2id) is None), None)
        return None if unknown is None else labels.unknown_label(unknown, self._label2id)


@dataclass
class TextGenerationDatasetConfig(DatasetConfig):
    """Settings of a `TextGenerationDataset`.

    Fields:
        max_length: the largest number of tokens of a sample; None means the tokenizer's.
        source_field, target_field: names of the columns of a source and its target.
        text_field: name of the column of plain texts, for files without these two.
        separator: stands between source and target; a prompt ends with it.
        block_size: a ``.txt`` file is cut into samples of this number of characters.
    """

    name = "text_generation"

    max_length: int | None = None
    source_field: str = "source"
    target_field: str = "target"
    text_field: str = "text"
    separator: str = "\n"
    block_size: int = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "max_length", or_none=True)
        check_positive(self, "block_size")


@register_dataset("text_generation", config_class=TextGenerationDatasetConfig)
class TextGenerationDataset(TextDataset):
    """Samples ``{"token_ids": (L,), "labels": (L,)}`` for a model that predicts each token from those before it.

    The labels are the tokens themselves, not shifted. In rows ``{"source", "target"}``, source and separator are the
    prompt, with labels -100; in rows ``{"text"}`` only a begin token is. A text ends with ``eos_token``, if there is
    one. If a sample is longer than ``max_length``, the end of its source is removed first.
    """

    known_by = (("source", "target"), ("text",))
    collator_class = TextGenerationDataCollator

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.row(index)
        tokenizer = self.part("tokenizer")
        limit = self.config.max_length or tokenizer.config.max_length
        end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        begin, source, separator, text = self._parts(tokenizer, row)
        if limit is not None:
            text = text[: max(1, limit - len(begin) - len(separator) - len(end))]
            source = source[: max(0, limit - len(begin) - len(separator) - len(text) - len(end))]
        prompt = [*begin, *source, *separator]
        return {"token_ids": [*prompt, *text, *end], "labels": [*[IGNORED] * len(prompt), *text, *end]}

    def _parts(self, tokenizer: Any, row: Row) -> tuple[list[int], list[int], list[int], list[int]]:
        """Begin token, source, separator and text."""
        begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]

        def ids(text: str) -> list[int]:
            # All of them, whatever the tokenizer's own max_length is: the caller truncates.
            found: list[int] = tokenizer.encode(self.normalized(text), max_length=_NO_LIMIT, add_special_tokens=False)
            return found

        if "text" in row:
            return begin, [], [], ids(row["text"])
        return begin, ids(row["source"]), _separator_ids(tokenizer, self.config.separator), ids(row["target"])

    def _load(self, split: str | None) -> list[Row]:
        path = self.split_file(split)
        return _blocks(path, self.config.block_size) if path.suffix == ".txt" else self._load_table(path)

    def _columns(self, row: Row) -> dict[str, str]:
        config = self.config
        if config.source_field in row or config.target_field in row:
            return {"source": config.source_field, "target": config.target_field}
        return {"text": config.text_field}

    def _fault(self, row: Row) -> str | None:
        wrong = [
            getattr(self.config, f"{name}_field") for name, text in row.items() if not isinstance(text, str) or not text
        ]
        return f"{', '.join(wrong)} must be text, and not empty" if wrong else None


def _separator_ids(tokenizer: Any, separator: str) -> list[int]:
    """The tokens of the separator. One that is a token of the vocabulary, such as a special token, is one token."""
    if not separator:
        return []
    own = tokenizer.token_id(separator)
    ids: list[int] = tokenizer.encode(separator, add_special_tokens=False) if own is None else [own]
    return ids


def _blocks(path: Path, size: int) -> list[Row]:
    text = read_text(path)
    starts = range(0, len(text), size)
    return [Row(text=text[start : start + size]).at(f"{path}, from character {start}") for start in starts]
