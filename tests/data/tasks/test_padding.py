"""Sequences of unequal lengths as one tensor; torch's own padding is the reference."""

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from trainwright.config.errors import ConfigError
from trainwright.data.tasks.padding import pad, pad_mask

ROWS = [torch.tensor([1, 2, 3]), torch.tensor([4]), torch.tensor([5, 6])]


@pytest.mark.parametrize("side", ["right", "left"])
def test_as_torch_does_it(side: str) -> None:
    wanted = pad_sequence(ROWS, batch_first=True, padding_value=-100, padding_side=side)
    got = pad([row.tolist() for row in ROWS], -100, side=side)  # type: ignore[arg-type]
    assert got.dtype == torch.int64
    assert got.tolist() == wanted.tolist()
    assert pad_mask(ROWS, side=side).tolist() == (wanted != -100).long().tolist()  # type: ignore[arg-type]


def test_rows_of_features_stay_floats() -> None:
    rows = [torch.ones(2, 3), torch.ones(4, 3)]
    got = pad(rows, 0.0)
    assert got.dtype == torch.float32
    assert got.tolist() == pad_sequence(rows, batch_first=True).tolist()


def test_empty_rows_are_rows() -> None:
    assert pad([[], [1, 2]], 9).tolist() == [[9, 9], [1, 2]]
    assert pad([[], []], 9).tolist() == [[9], [9]]
    assert pad([[], [1, 2]], 9, side="left").tolist() == [[9, 9], [1, 2]]
    assert pad_mask([[], [1]]).tolist() == [[0], [1]]


def test_what_is_given_stays() -> None:
    rows = [[1], [2, 3]]
    pad(rows, 0)
    assert rows == [[1], [2, 3]]


def test_a_wrong_side_is_told() -> None:
    with pytest.raises(ConfigError, match="'right' or 'left'"):
        pad(ROWS, 0, side="up")  # type: ignore[arg-type]
