"""TextNormalizer: one spelling for texts that look the same."""

import pytest

from trainwright.config.errors import ConfigError
from trainwright.data import TextNormalizer, TextNormalizerConfig


def test_what_looks_the_same_is_the_same() -> None:
    normalizer = TextNormalizer()
    assert normalizer(["ﬁn", "e\u0301", " a\t\n b ", "①"]) == ["fin", "é", "a b", "1"]
    assert normalizer("Ａ") == "A"


def test_settings() -> None:
    assert TextNormalizer(form="", collapse_spaces=False)(" ﬁ ") == " ﬁ "
    assert TextNormalizer(lowercase=True, replace_patterns=[["ي", "ی"], [r"\d+", "0"]])("AB ي 123") == "ab ی 0"


def test_wrong_settings_are_told() -> None:
    with pytest.raises(ConfigError, match="form: got 'NFX'"):
        TextNormalizerConfig(form="NFX")
    with pytest.raises(ConfigError, match=r"replace_patterns: got \['\(', ''\]"):
        TextNormalizerConfig(replace_patterns=[["(", ""]])
    with pytest.raises(ConfigError, match="replace_patterns: got 'a'"):
        TextNormalizerConfig(replace_patterns=["a"])
