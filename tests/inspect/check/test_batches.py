"""Batches are joined, their labels permuted, their content fingerprinted."""

from typing import Any

import numpy as np
import pytest
import torch

from trainwright.data import Instance
from trainwright.inspect.check.batches import fingerprint, joined, labels_are_inputs, with_permuted_labels
from trainwright.inspect.check.finding import Skipped


def test_join() -> None:
    one = {"images": torch.ones(2, 3), "texts": ["a", "b"], "scale": 2.0}
    whole = joined([one, one])
    assert whole["images"].shape == (4, 3)
    assert whole["texts"] == ["a", "b", "a", "b"]
    assert whole["scale"] == 2.0
    pair = joined([(torch.ones(2, 3), torch.zeros(2))] * 3)
    assert [part.shape[0] for part in pair] == [6, 6]
    assert joined([Instance(x=torch.ones(2)), Instance(x=torch.ones(1))]).x.shape == (3,)


def test_texts_of_different_lengths_cannot_be_joined() -> None:
    with pytest.raises(Skipped, match="cannot be joined"):
        joined([{"ids": torch.ones(2, 3)}, {"ids": torch.ones(2, 4)}])


def test_labels_are_permuted_and_the_inputs_stay() -> None:
    generator = torch.Generator().manual_seed(0)
    batch = {"images": torch.arange(20.0), "labels": torch.arange(20)}
    found: Any = with_permuted_labels(batch, generator)
    assert torch.equal(found["images"], batch["images"])
    assert not torch.equal(found["labels"], batch["labels"])
    assert torch.equal(found["labels"].sort().values, batch["labels"])
    assert with_permuted_labels({"images": torch.ones(3)}, generator) is None


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
