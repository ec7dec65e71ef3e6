"""The examples in the docstrings of datasets and preprocessors run and give what they say."""

import doctest
import importlib

import pytest

MODULES = ["labels", "dataset", "image2text.image_processor", "padding", "preprocessor", "tokenizer"]


@pytest.mark.parametrize("name", [*(f"tasks.{module}" for module in MODULES), "checkpoint.hub"])
def test_examples_of_docstrings(name: str) -> None:
    result = doctest.testmod(importlib.import_module(f"trainwright.{name}"))
    assert result.attempted > 0
    assert result.failed == 0
