"""Data sets of texts: a label for each text, a label for each token, and texts to generate.  L tokens."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainwright.config.errors import ConfigError
from trainwright.data.tasks import labels as char_labels
from trainwright.data.tasks.collators import (
    IGNORED,
    SequenceLabelingDataCollator,
    TextGenerationDataCollator,
    TextPaddingDataCollator,
)
from trainwright.data.tasks.dataset import Dataset, DatasetConfig, register_dataset
from trainwright.data.tasks.tables import Row, check_columns, files_with, raise_faults, read_rows, read_text
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


_WHOLE = 2**31 - 1


@dataclass
class TextGenerationDatasetConfig(DatasetConfig):
    """What a `TextGenerationDataset` reads.

    Fields:
        max_length: most tokens of a sample; None leaves that to the tokenizer.
        source_field, target_field: names of the columns of a source and the answer to it.
        text_field: name of the column of plain texts, for files without these two.
        separator: stands between source and target; a prompt ends with it.
        block_size: a ``.txt`` file is cut into samples of so many characters.
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
        check_max_length(self)
        if self.block_size < 1:
            raise ConfigError(
                f"{type(self).__name__}.block_size: got {self.block_size}; it must be a whole number >= 1."
            )


@register_dataset("text_generation", config_class=TextGenerationDatasetConfig)
class TextGenerationDataset(TextDataset):
    """Samples ``{"token_ids": (L,), "labels": (L,)}`` for a model that predicts each token from those before it.

    The labels are the tokens themselves, not shifted. Of rows ``{"source", "target"}`` source and separator are the
    prompt, with labels -100; of rows ``{"text"}`` only a begin token is. A text ends with ``eos_token``, if there
    is one. What is longer than ``max_length`` loses the end of its source first.
    """

    known_by = (("source", "target"), ("text",))

    def __init__(self, config: Any, split: str | None = None, preprocessor: Any = None, **overrides: Any) -> None:
        super().__init__(config, split, preprocessor, **overrides)
        self.data_collator = TextGenerationDataCollator()
        self.connect()

    def _load(self, split: str | None) -> list[Row]:
        path = self.split_file(split)
        if path.suffix == ".txt":
            return _blocks(path, self.config.block_size)
        config = self.config
        rows = read_rows(path)
        has_pairs = config.source_field in rows[0] or config.target_field in rows[0]
        names = (
            {"source": config.source_field, "target": config.target_field} if has_pairs else {"text": config.text_field}
        )
        check_columns(path, rows[0], names.values())
        found, faults = [], []
        for row in rows:
            kept = Row({name: row.get(field) for name, field in names.items()})
            kept.where = row.where
            wrong = [names[name] for name, text in kept.items() if not isinstance(text, str) or not text]
            faults += [f"{row.where}: {', '.join(wrong)} must be text, and not empty"] if wrong else []
            found.append(kept)
        raise_faults(faults, len(rows))
        return found

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
            # Whole, whatever the tokenizer's own max_length is: what is cut is decided by the caller.
            found: list[int] = tokenizer.encode(self.normalized(text), max_length=_WHOLE, add_special_tokens=False)
            return found

        if "text" in row:
            return begin, [], [], ids(row["text"])
        return begin, ids(row["source"]), ids_of_separator(tokenizer, self.config.separator), ids(row["target"])


def ids_of_separator(tokenizer: Any, separator: str) -> list[int]:
    """The separator's tokens: itself, where it is one of the vocabulary, as a special token is."""
    if not separator:
        return []
    own = tokenizer.token_id(separator)
    ids: list[int] = tokenizer.encode(separator, add_special_tokens=False) if own is None else [own]
    return ids


def _blocks(path: Path, size: int) -> list[Row]:
    text = read_text(path)
    starts = range(0, len(text), size)
    rows = []
    for start in starts:
        row = Row(text=text[start : start + size])
        row.where = f"{path}, from character {start}"
        rows.append(row)
    return rows
