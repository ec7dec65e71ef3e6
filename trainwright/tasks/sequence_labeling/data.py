"""Sequence labeling: a label for each token of a text.  L tokens."""

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainwright.data.errors import DataError
from trainwright.tasks import labels
from trainwright.tasks.dataset import LabeledDatasetConfig, TextDataset, register_dataset
from trainwright.tasks.padding import IGNORED, Batch, Samples, TextCollator, pad
from trainwright.tasks.tables import Row, read_text

_CONLL = (".txt", ".tsv")


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

    Labels are -100 at special tokens, at all pieces of a word but the first, and where the file has -100. Files
    ``.txt`` and ``.tsv`` are in the format of CoNLL: a token in each line, its label at the end of the line, and an
    empty line after each sentence. A header of the names of the fields, and lines that start with "#" and have another
    number of columns than tokens have, are skipped.
    """

    forms = ({"tokens": "tokens_field", "labels": "tags_field"},)
    collator_class = SequenceLabelingDataCollator

    def __init__(self, config: Any, split: str | None = None, preprocessor: Any = None, **overrides: Any) -> None:
        super().__init__(config, split, preprocessor, **overrides)
        if self.config.is_iob_schema is None:
            self.config.is_iob_schema = all(label == "O" or label[:2] in ("B-", "I-") for label in self._label2id)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.row(index)
        words = [self.normalized(token) for token in row["tokens"]]
        token_ids, numbers = self.part("tokenizer").encode_words(words, max_length=self.config.max_length)
        word_labels = [
            IGNORED if self._is_ignored(label) else labels.id_of(label, self._label2id) for label in row["labels"]
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
        return list(_sentences(path, self.config.tokens_field, self.config.tags_field or "labels"))

    def _is_alike(self, path: Path, columns: Collection[str]) -> bool:
        return path.suffix in _CONLL or super()._is_alike(path, columns)

    def _id2label(self, rows: Iterable[Row]) -> dict[int, str]:
        tags = (tag for row in rows for tag in row["labels"] or () if not self._is_ignored(tag))
        return labels.classes_of(tags, repr(self))

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


def _sentences(path: Path, tokens_field: str, tags_field: str) -> Iterator[Row]:
    lines = _lines(path, (tokens_field, tags_field))
    sentence: list[tuple[int, list[str]]] = []
    for number, parts in [*lines, (0, [])]:
        if parts and parts[0] != "-DOCSTART-":
            sentence.append((number, parts))
            continue
        if sentence:
            if alone := next((number for number, parts in sentence if len(parts) < 2), None):
                raise DataError(f"{path}, line {alone}: must have a token and its label, separated by a space or tab.")
            row = {tokens_field: [parts[0] for _, parts in sentence], tags_field: [parts[-1] for _, parts in sentence]}
            yield Row(row).at(f"{path}, line {sentence[0][0]}")
        sentence = []


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
