"""TextNormalizer: one spelling for texts that look the same."""

import re
import unicodedata
from dataclasses import dataclass, field
from typing import Any

from trainwright.config.errors import ConfigError
from trainwright.data.tasks.preprocessor import Preprocessor, PreprocessorConfig, register_preprocessor

_FORMS = ("NFC", "NFD", "NFKC", "NFKD", "")


@dataclass
class TextNormalizerConfig(PreprocessorConfig):
    """What is done to a text, in this order.

    Fields:
        form: Unicode's normal form: "NFKC" (default), "NFC", "NFD", "NFKD", or "" for none.
        replace_patterns: pairs of a regular expression and its replacement, one after the other.
        lowercase: small letters only.
        collapse_spaces: each run of white space becomes one space; none at the ends.
    """

    name = "text_normalizer"
    filename = "normalizer_config.yaml"

    form: str = "NFKC"
    replace_patterns: list[Any] = field(default_factory=list)
    lowercase: bool = False
    collapse_spaces: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.form not in _FORMS:
            raise ConfigError(f"TextNormalizerConfig.form: got {self.form!r}; NFC, NFD, NFKC, NFKD or '' is allowed.")
        for pair in self.replace_patterns:
            try:
                pattern, replacement = pair
                re.sub(pattern, replacement, "")
            except (ValueError, TypeError, re.error) as error:
                raise ConfigError(
                    f"TextNormalizerConfig.replace_patterns: got {pair!r}; each is a pair of a regular expression and "
                    f"its replacement ({error})."
                ) from error


@register_preprocessor("text_normalizer", config_class=TextNormalizerConfig)
class TextNormalizer(Preprocessor):
    """
    >>> TextNormalizer()("ﬁne   ①")
    'fine 1'
    """

    kind = "text_normalizer"

    def __call__(self, texts: Any) -> Any:
        """One text, or a list of them."""
        return self._one(texts) if isinstance(texts, str) else [self._one(text) for text in texts]

    def _one(self, text: str) -> str:
        config = self.config
        text = unicodedata.normalize(config.form, text) if config.form else text
        for pattern, replacement in config.replace_patterns:
            text = re.sub(pattern, replacement, text)
        text = text.lower() if config.lowercase else text
        return " ".join(text.split()) if config.collapse_spaces else text
