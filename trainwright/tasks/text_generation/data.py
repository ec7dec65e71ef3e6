"""Text generation: texts, or sources and their targets.  L tokens."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainwright.base.batch import IGNORED
from trainwright.config.yaml_config import check_positive
from trainwright.tasks.dataset import DatasetConfig, TextDataset, register_dataset
from trainwright.tasks.sequence_labeling.data import SequenceLabelingDataCollator
from trainwright.tasks.tables import Row, read_text

_NO_LIMIT = 2**31 - 1


class TextGenerationDataCollator(SequenceLabelingDataCollator):
    """``token_ids``, ``attention_mask`` and ``labels`` (B, L): each label is the token at its position, or -100."""


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

    forms = ({"source": "source_field", "target": "target_field"}, {"text": "text_field"})
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
        begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]

        def ids(text: str) -> list[int]:
            # All of them, whatever the tokenizer's own max_length is: the caller truncates.
            found: list[int] = tokenizer.encode(self.normalized(text), max_length=_NO_LIMIT, add_special_tokens=False)
            return found

        if "text" in row:
            return begin, [], [], ids(row["text"])
        text = self.config.separator
        own = tokenizer.token_id(text) if text else None  # such as a special token
        separator = [own] if own is not None else tokenizer.encode(text, add_special_tokens=False) if text else []
        return begin, ids(row["source"]), separator, ids(row["target"])

    def _table(self, path: Path) -> list[Row]:
        if path.suffix != ".txt":
            return super()._table(path)
        text, size = read_text(path), self.config.block_size
        blocks = ((start, text[start : start + size]) for start in range(0, len(text), size))
        return [Row({self.config.text_field: block}).at(f"{path}, from character {start}") for start, block in blocks]

    def _fault(self, row: Row) -> str | None:
        wrong = [
            getattr(self.config, f"{name}_field") for name, text in row.items() if not isinstance(text, str) or not text
        ]
        return f"{', '.join(wrong)} must be text, and not empty" if wrong else None
