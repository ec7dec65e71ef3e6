"""Texts to be written: plain ones, or answers to a source.  L tokens."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainwright.config.errors import ConfigError
from trainwright.data.tasks.collators import IGNORED, TextGenerationDataCollator
from trainwright.data.tasks.dataset import DatasetConfig, register_dataset
from trainwright.data.tasks.tables import Row, check_columns, raise_faults, read_rows, read_text
from trainwright.data.tasks.text_datasets import TextDataset
from trainwright.data.tasks.tokenizer import check_max_length

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
