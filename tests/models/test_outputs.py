"""Outputs by name: dicts, dataclasses and named tuples, and the scalars among them."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import torch

from trainwright.models.outputs import named_outputs, scalars_of

Named = namedtuple("Named", ["loss", "logits"])


@dataclass
class Fields:
    loss: Any
    logits: Any


def test_dicts_dataclasses_and_named_tuples_have_names() -> None:
    expected = {"loss": 1, "logits": 2}
    assert named_outputs(Named(1, 2)) == named_outputs(Fields(1, 2)) == named_outputs(OrderedDict(expected)) == expected


def test_other_outputs_have_none() -> None:
    assert [named_outputs(other) for other in (torch.ones(2), (1, 2), [1], None, Fields)] == [None] * 5


def test_scalars_are_numbers_and_tensors_of_one_element() -> None:
    outputs = {"a": 1, "b": 0.5, "c": torch.ones(1, 1), "d": torch.ones(2), "e": True, "f": "x", "g": None}
    assert list(scalars_of(outputs)) == ["a", "b", "c"]
