"""Collators: from a list of samples (dictionaries) to a batch (a dictionary), with padding. Samples are not changed.

B samples, L tokens or characters, C channels, H height, W width, T frames, F features; L and T are
the longest of the batch.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from trainwright.config.errors import ConfigError
from trainwright.data.errors import DataError


def pad(sequences: Sequence[Any], value: float, *, side: Literal["right", "left"] = "right") -> Tensor:
    """(B, L) or (B, L, F) of B sequences (l,) or (l, F), filled up with ``value`` after (or before) their ends.

    Whole numbers give int64. Nothing that is given is changed. L is at least 1, so that an empty text is a row, too.

    >>> pad([[5, 6, 7], [8]], 0)
    tensor([[5, 6, 7],
            [8, 0, 0]])
    """
    if side not in ("right", "left"):
        raise ConfigError(f"side: got {side!r}; 'right' or 'left' is allowed.")
    rows = [_as_tensor(row) for row in sequences]
    filled = next((row for row in rows if row.numel()), rows[0])
    length = max(1, *(len(row) for row in rows))
    padded = torch.full((len(rows), length, *filled.shape[1:]), value, dtype=filled.dtype, device=filled.device)
    for number, row in enumerate(rows):
        if len(row):
            padded[number, : len(row)] = row
    if side == "right":
        return padded
    shifts = [length - len(row) for row in rows]
    return torch.stack([row.roll(shift, dims=0) for row, shift in zip(padded, shifts, strict=True)])


def pad_mask(sequences: Sequence[Any], *, side: Literal["right", "left"] = "right") -> Tensor:
    """(B, L) int64: 1 where `pad` has kept a value, 0 where it has filled up."""
    return pad([torch.ones(len(row), dtype=torch.int64, device="cpu") for row in sequences], 0, side=side)


def _as_tensor(row: Any) -> Tensor:
    tensor = row if isinstance(row, Tensor) else torch.as_tensor(row, device="cpu")
    if tensor.numel() == 0 and not isinstance(row, Tensor):
        return tensor.to(torch.int64)  # an empty list has no type of its own
    return tensor if tensor.is_floating_point() else tensor.to(torch.int64)


IGNORED = -100  # a label that no loss and no metric counts

Samples = Sequence[dict[str, Any]]

Batch = dict[str, Tensor]


class CharLevelOCRDataCollator:
    """``pixel_values`` (B, C, H, W) and ``labels`` (B, L), filled up with ``pad_token_id``: CTC's blank.

    Raises:
        DataError: pictures are of different sizes.
    """

    def __init__(self, pad_token_id: int = 0) -> None:
        self.pad_token_id = pad_token_id

    def __call__(self, samples: Samples) -> Batch:
        batch = {"pixel_values": _pictures(samples)}
        if "labels" in samples[0]:
            batch["labels"] = pad([sample["labels"] for sample in samples], self.pad_token_id)
        return batch


class ImageCaptioningDataCollator:
    """``pixel_values`` (B, C, H, W) and ``labels`` (B, L), filled up with -100."""

    def __call__(self, samples: Samples) -> Batch:
        return {"pixel_values": _pictures(samples), "labels": pad([s["labels"] for s in samples], IGNORED)}


class _WithTokenizer:
    """Texts are filled up with the padding of ``tokenizer``, which its data set hands over when it gets one."""

    def __init__(self, tokenizer: Any = None) -> None:
        self.tokenizer = tokenizer

    def _texts(self, samples: Samples) -> Batch:
        rows = [sample["token_ids"] for sample in samples]
        value = 0 if self.tokenizer is None else self.tokenizer.pad_token_id
        return {"token_ids": pad(rows, value), "attention_mask": pad_mask(rows)}


class TextPaddingDataCollator(_WithTokenizer):
    """``token_ids`` and ``attention_mask`` (B, L), and ``labels`` (B,), one for each text."""

    def __call__(self, samples: Samples) -> Batch:
        batch = self._texts(samples)
        if "labels" in samples[0]:
            batch["labels"] = torch.as_tensor([sample["labels"] for sample in samples], device="cpu")
        return batch


class SequenceLabelingDataCollator(_WithTokenizer):
    """``token_ids``, ``attention_mask`` and ``labels`` (B, L), one for each token; -100 at padding."""

    def __call__(self, samples: Samples) -> Batch:
        return {**self._texts(samples), "labels": pad([s["labels"] for s in samples], IGNORED)}


class TextGenerationDataCollator(SequenceLabelingDataCollator):
    """``token_ids``, ``attention_mask`` and ``labels`` (B, L): the labels of each place are its token, or -100."""


class SpeechRecognitionDataCollator:
    """``input_features`` (B, T, F) and ``attention_mask`` (B, T), and ``labels`` (B, L) filled up with
    ``pad_token_id``, CTC's blank.
    """

    def __init__(self, pad_token_id: int = 0) -> None:
        self.pad_token_id = pad_token_id

    def __call__(self, samples: Samples) -> Batch:
        rows = [sample["input_features"] for sample in samples]
        batch = {"input_features": pad(rows, 0.0), "attention_mask": pad_mask(rows)}
        if "labels" in samples[0]:
            batch["labels"] = pad([sample["labels"] for sample in samples], self.pad_token_id)
        return batch


def _pictures(samples: Samples) -> Tensor:
    pictures = [torch.as_tensor(sample["pixel_values"], device="cpu") for sample in samples]
    if len({picture.shape for picture in pictures}) > 1:
        shapes = sorted({tuple(picture.shape) for picture in pictures})
        raise DataError(
            f"pixel_values: pictures of one batch have the shapes (channels, height, width) {shapes}; give the image "
            "processor a size=(width, height), which makes them equal."
        )
    return torch.stack(pictures)
