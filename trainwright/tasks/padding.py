"""Padding: samples of different lengths as one tensor, and the bases of collators. Samples are not changed.

B samples, L tokens or characters, T frames, F features; L and T are the longest of the batch.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


def pad(sequences: Sequence[Any], value: float) -> Tensor:
    """Pad B sequences (l,) or (l, F) with ``value`` on the right to a tensor (B, L) or (B, L, F).

    Whole numbers give int64. The sequences are not changed. L is at least 1, so that an empty text is a row, too.

    >>> pad([[5, 6, 7], [8]], 0)
    tensor([[5, 6, 7],
            [8, 0, 0]])
    """
    rows = [_as_tensor(row) for row in sequences]
    filled = next((row for row in rows if row.numel()), None)
    if filled is None:
        return rows[0].new_full((len(rows), 1, *rows[0].shape[1:]), value)
    return pad_sequence([row if len(row) else filled[:0] for row in rows], batch_first=True, padding_value=value)


def pad_mask(sequences: Sequence[Any]) -> Tensor:
    """The attention mask of `pad`, int64 (B, L): 1 at values, 0 at padding."""
    return pad([torch.ones(len(row), dtype=torch.int64, device="cpu") for row in sequences], 0)


def _as_tensor(row: Any) -> Tensor:
    tensor = row if isinstance(row, Tensor) else torch.as_tensor(row, device="cpu")
    if tensor.numel() == 0 and not isinstance(row, Tensor):
        return tensor.to(torch.int64)  # an empty list has no type
    return tensor if tensor.is_floating_point() else tensor.to(torch.int64)


Samples = Sequence[dict[str, Any]]
Batch = dict[str, Tensor]


class BlankCollator:
    """Base of collators that pad labels (B, L) with ``pad_token_id``, the blank of CTC."""

    def __init__(self, pad_token_id: int = 0) -> None:
        self.pad_token_id = pad_token_id

    def labels(self, samples: Samples) -> Batch:
        rows = [sample["labels"] for sample in samples if "labels" in samples[0]]
        return {"labels": pad(rows, self.pad_token_id)} if rows else {}


class TextCollator:
    """Base of collators that pad with the padding token of ``tokenizer``, which the data set sets."""

    def __init__(self, tokenizer: Any = None) -> None:
        self.tokenizer = tokenizer

    def texts(self, samples: Samples) -> Batch:
        rows = [sample["token_ids"] for sample in samples]
        value = 0 if self.tokenizer is None else self.tokenizer.pad_token_id
        return {"token_ids": pad(rows, value), "attention_mask": pad_mask(rows)}
