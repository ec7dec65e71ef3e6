"""The room's names, and what importing them costs."""

import pytest

import trainwright.models as models


@pytest.mark.parametrize("name", models.__all__)
def test_a_name_is_there(name: str) -> None:
    assert getattr(models, name).__name__.rpartition(".")[2] == name


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="CRNN"):
        models.CRNN  # noqa: B018
