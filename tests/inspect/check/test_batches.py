"""Batches are joined, their labels permuted, their content fingerprinted."""

from typing import Any

import numpy as np
import pytest
import torch

from trainwright.data import Instance
from trainwright.inspect.check.batches import fingerprint, joined, labels_are_inputs
from trainwright.inspect.check.finding import Skipped


def test_texts_of_different_lengths_cannot_be_joined() -> None:
    with pytest.raises(Skipped, match="cannot be joined"):
        joined([{"ids": torch.ones(2, 3)}, {"ids": torch.ones(2, 4)}])


def test_labels_of_a_language_model_are_its_inputs() -> None:
    tokens = torch.randint(50, (4, 8))
    assert labels_are_inputs({"input_ids": tokens, "labels": tokens})
    assert not labels_are_inputs((torch.rand(4, 8), torch.randint(5, (4,))))


@pytest.mark.parametrize(
    "value", [torch.ones(3), np.ones(3), "text", 4, None, {"a": [1, torch.ones(())]}, Instance(a=1)]
)
def test_a_fingerprint_depends_on_the_content(value: Any) -> None:
    assert fingerprint((value, 1)) == fingerprint((value, 1)) != fingerprint((value, 2))


def test_an_object_has_no_fingerprint() -> None:
    with pytest.raises(Skipped, match="with object cannot be compared"):
        fingerprint({"a": object()})
