"""Sequence labeling: a label for each token of a text.  L tokens."""

import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainwright.base.batch import IGNORED
from trainwright.base.errors import ConfigError
from trainwright.data.errors import DataError
from trainwright.tasks import labels
from trainwright.tasks.dataset import LabeledDatasetConfig, TextDataset, register_dataset
from trainwright.tasks.padding import Batch, Samples, TextCollator, pad
from trainwright.tasks.tables import COLUMN_FILES, Row, read_text

logger = logging.getLogger("trainwright.tasks")

_CONLL = (".txt", ".tsv", *COLUMN_FILES)
_NUMBER_OF_NO_WORD = re.compile(r"\d+[-.]\d+")  # CoNLL-U: a token of several words, and an elided word
_MOST_COLUMNS = 4  # of files that end with the label, such as those of CoNLL-2003


class SequenceLabelingDataCollator(TextCollator):
    """``token_ids``, ``attention_mask`` and ``labels`` (B, L), one per token; -100 at padding."""

    def __call__(self, samples: Samples) -> Batch:
        return {**self.texts(samples), "labels": pad([s["labels"] for s in samples], IGNORED)}


@dataclass
class SequenceLabelingDatasetConfig(LabeledDatasetConfig):
    """Settings of a `SequenceLabelingDataset`.

    Fields:
        id2label: the labels of tokens by id; None takes those of all splits, sorted.
        max_length: longer texts are truncated to this number of tokens; None means the tokenizer's.
        label_all_tokens: every piece of a word has its label; otherwise only the first piece, the others have -100.
        is_iob_schema: whether labels name spans in a scheme with prefixes such as "B-": IOB1, IOB2, IOE, IOBES, BILOU,
            BMES. None follows most of the labels; a warning names each label that is not as these.
        tokens_field, tags_field: names of the columns; None finds the tags under "labels" or "tags".
        tokens_column, tags_column: numbers of the columns in a file without names; the first is 0, the last -1, which
            are the ones that None means. Files of CoNLL-U and others with more than four columns need both.
    """

    name = "sequence_labeling"

    label_all_tokens: bool = False
    is_iob_schema: bool | None = None
    tokens_field: str = "tokens"
    tags_field: str | None = None
    tokens_column: int | None = None
    tags_column: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("tokens_column", "tags_column"):
            if (column := getattr(self, name)) is not None and type(column) is not int:
                raise ConfigError(
                    f"{type(self).__name__}.{name}: got {column!r}; it must be the number of a column, 0 for the first."
                )


@register_dataset("sequence_labeling", config_class=SequenceLabelingDatasetConfig)
class SequenceLabelingDataset(TextDataset):
    """Samples ``{"token_ids": (L,), "labels": (L,)}`` of rows ``{"tokens", "labels"}``, two lists of one length.

    Labels are -100 at special tokens, at all pieces of a word but the first, and where the file has -100. Files
    ``.txt``, ``.tsv``, ``.conll``, ``.conllu`` and ``.bio`` are in a format of CoNLL: a token in each line with its
    label in another column, and an empty line after each sentence. A header of the names of the fields, and lines that
    start with "#" and have another number of columns than tokens have, are skipped.
    """

    forms = ({"tokens": "tokens_field", "labels": "tags_field"},)
    collator_class = SequenceLabelingDataCollator

    def __init__(self, config: Any, split: str | None = None, preprocessor: Any = None, **overrides: Any) -> None:
        super().__init__(config, split, preprocessor, **overrides)
        self.config.is_iob_schema, faults = labels.span_scheme(self._label2id, self.config.is_iob_schema)
        self._warn_of(faults)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.row(index)
        words = [self.normalized(token) for token in row["tokens"]]
        token_ids, numbers = self.part("tokenizer").encode_words(words, max_length=self.config.max_length)
        word_labels = [
            IGNORED if self._is_ignored(label) else labels.known_id(label, self._label2id) for label in row["labels"]
        ]
        token_labels, before = [], None
        for number in numbers:
            is_labeled = number is not None and (number != before or self.config.label_all_tokens)
            token_labels.append(word_labels[number] if is_labeled else IGNORED)
            before = number
        return {"token_ids": token_ids, "labels": token_labels}

    def _columns(self, row: Row) -> dict[str, str]:
        tags_field = self.config.tags_field or ("tags" if "tags" in row and "labels" not in row else "labels")
        return {**super()._columns(row), "labels": tags_field}

    def _table(self, path: Path) -> list[Row]:
        if path.suffix not in _CONLL:
            return super()._table(path)
        config = self.config
        fields = config.tokens_field, config.tags_field or "labels"
        return list(_sentences(path, fields, (config.tokens_column, config.tags_column)))

    def _is_alike(self, path: Path, columns: Collection[str]) -> bool:
        return path.suffix in _CONLL or super()._is_alike(path, columns)

    def _id2label(self, rows: Iterable[Row]) -> dict[int, str]:
        tags = (tag for row in rows for tag in row["labels"] or () if not self._is_ignored(tag))
        return labels.classes_of(tags, repr(self))

    def _warn_of(self, faults: Mapping[str, str]) -> None:
        """Log the fault of each label with the first place that has it."""
        unseen: dict[int | None, str] = {self._label2id[label]: fault for label, fault in faults.items()}
        for row in self.data if unseen else ():
            for tag in row["labels"]:
                if fault := unseen.pop(labels.id_of(tag, self._label2id), None):
                    where = getattr(row, "where", repr(self))
                    logger.warning("%s: %s. Correct it, or set is_iob_schema of the data set.", where, fault)

    def _is_ignored(self, tag: Any) -> bool:
        name = str(tag).strip()
        return name == str(IGNORED) and name not in (self.config.id2label or {}).values()

    def _fault(self, row: Row) -> str | None:
        tokens, tags = row["tokens"], row["labels"]
        if not (isinstance(tokens, list) and isinstance(tags, list) and tokens):
            return "tokens and labels must be lists, with at least one token (in JSON lines, not in CSV)"
        if not all(isinstance(token, str) for token in tokens):
            return "each token must be text"
        if len(tokens) != len(tags):
            return f"has {len(tokens)} tokens and {len(tags)} labels"
        faults = (labels.class_fault(tag, self._label2id) for tag in tags if not self._is_ignored(tag))
        return next(filter(None, faults), None)


def _sentences(path: Path, fields: tuple[str, str], columns: tuple[int | None, int | None]) -> Iterator[Row]:
    lines = _lines(path, fields)
    _check_columns(path, lines, columns)
    token, tag = (default if column is None else column for column, default in zip(columns, (0, -1), strict=True))
    sentence: list[tuple[int, list[str]]] = []
    for number, parts in [*lines, (0, [])]:
        if parts and parts[0] != "-DOCSTART-":
            if token == 0 or not _NUMBER_OF_NO_WORD.fullmatch(parts[0]):
                sentence.append((number, parts))
            continue
        if sentence:
            row = {name: [parts[i] for _, parts in sentence] for name, i in zip(fields, (token, tag), strict=True)}
            yield Row(row).at(f"{path}, line {sentence[0][0]}")
        sentence = []


def _check_columns(path: Path, lines: list[tuple[int, list[str]]], columns: tuple[int | None, int | None]) -> None:
    """Check that each line of a token has the columns, and that they need not be guessed.

    Raises:
        DataError: a line has too few. ConfigError: the first and the last column are no tokens and labels.
    """
    tokens = [(number, parts) for number, parts in lines if parts and parts[0] != "-DOCSTART-"]
    if None in columns and tokens:
        width, numbers = max(len(parts) for _, parts in tokens), all(parts[0].isdecimal() for _, parts in tokens)
        if width > _MOST_COLUMNS or (width > 2 and numbers):
            number, parts = tokens[0]
            shown = ", ".join(f"{i} {part!r}" for i, part in enumerate(parts))
            raise ConfigError(
                f"{path}: has {width} columns; which of them are tokens and labels? Set tokens_column and tags_column,"
                " for example SequenceLabelingDataset.load(path, tokens_column=1, tags_column=3). The columns of line"
                f" {number}: {shown}"
            )
    needed = max(2, *(0 if i is None else i + 1 if i >= 0 else -i for i in columns))
    for number, parts in tokens:
        if len(parts) < needed:
            what = "must have a token and its label, separated by a space or tab"
            short = what if needed == 2 else f"has {len(parts)} columns; tokens_column and tags_column are {columns}"
            raise DataError(f"{path}, line {number}: {short}.")


def _lines(path: Path, header: tuple[str, str]) -> list[tuple[int, list[str]]]:
    """Numbers and columns of the lines, without a header and comments: "#" and another number of columns."""
    lines = [(number, _parts(line)) for number, line in enumerate(read_text(path).split("\n"), start=1)]
    tokens = [parts for _, parts in lines if parts and parts[0] != "-DOCSTART-" and not parts[0].startswith("#")]
    widths = {len(parts) for parts in tokens}
    if widths:
        lines = [(n, parts) for n, parts in lines if not "".join(parts[:1]).startswith("#") or len(parts) in widths]
    first = next((place for place, (_, parts) in enumerate(lines) if parts), None)
    if first is not None and (lines[first][1][0], lines[first][1][-1]) == header:
        del lines[first]
    return lines


def _parts(line: str) -> list[str]:
    """The columns of a line. Other white space, such as a no-break space, is part of a token."""
    line = line.strip(" \t\r")
    return re.split(r"\t" if "\t" in line else " +", line) if line.strip() else []
