"""Data sets of texts, whose samples are made by a tokenizer."""

from typing import Any, ClassVar

from trainwright.tasks.dataset import TableDataset


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
