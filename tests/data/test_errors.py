"""Samples that cannot form a batch: the error names the sample, the field, and what differs."""

import numpy as np
import pytest
import torch

from trainwright.data import DataError, collate


@pytest.mark.parametrize(
    ("samples", "fact"),
    [
        (
            [{"image": np.zeros((1, 8))}, {"image": np.zeros((8,))}],
            r"sample 1 of the batch has 'image' of shape \(8,\); sample 0 has \(1, 8\)",
        ),
        (
            [(torch.zeros(2), 1), (torch.zeros(2), 1), (torch.zeros(3), 1)],
            r"sample 2 of the batch has '\[0\]' of shape \(3,\)",
        ),
        ([{"a": 1}, {"b": 1}], r"sample 1 of the batch has keys \['b'\]; sample 0 has \['a'\]"),
        ([{"a": [1, 2]}, {"a": [1]}], "sample 1 of the batch has 'a' of length 1; sample 0 has 2"),
        ([torch.zeros(2), None], "sample 1 of the batch has type NoneType; sample 0 has torch.float32"),
        ([object(), object()], "the samples cannot be batched"),
    ],
)
def test_what_does_not_fit_is_said_with_its_place(samples, fact):
    with pytest.raises(DataError, match=fact):
        collate(samples)
