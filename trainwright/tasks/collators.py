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
    """Pad B sequences (l,) or (l, F) with ``value`` to a tensor (B, L) or (B, L, F).

    Whole numbers give int64. The sequences are not changed. L is at least 1, so that an empty text is a row, too.

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
    """The attention mask of `pad`, int64 (B, L): 1 at values, 0 at padding."""
    return pad([torch.ones(len(row), dtype=torch.int64, device="cpu") for row in sequences], 0, side=side)


def _as_tensor(row: Any) -> Tensor:
    tensor = row if isinstance(row, Tensor) else torch.as_tensor(row, device="cpu")
    if tensor.numel() == 0 and not isinstance(row, Tensor):
        return tensor.to(torch.int64)  # an empty list has no type
    return tensor if tensor.is_floating_point() else tensor.to(torch.int64)


IGNORED = -100  # the label that losses and metrics ignore
Samples = Sequence[dict[str, Any]]
Batch = dict[str, Tensor]


class _WithBlank:
    """Base of collators that pad labels (B, L) with ``pad_token_id``, the blank of CTC."""

    def __init__(self, pad_token_id: int = 0) -> None:
        self.pad_token_id = pad_token_id

    def _labels(self, samples: Samples) -> Batch:
        rows = [sample["labels"] for sample in samples if "labels" in samples[0]]
        return {"labels": pad(rows, self.pad_token_id)} if rows else {}


class CharLevelOCRDataCollator(_WithBlank):
    """``pixel_values`` (B, C, H, W) and ``labels`` (B, L), padded with ``pad_token_id``, the blank of CTC.

    Raises:
        DataError: images have different sizes.
    """

    def __call__(self, samples: Samples) -> Batch:
        return {"pixel_values": _images(samples), **self._labels(samples)}


class ImageCaptioningDataCollator:
    """``pixel_values`` (B, C, H, W) and ``labels`` (B, L), padded with -100."""

    def __call__(self, samples: Samples) -> Batch:
        return {"pixel_values": _images(samples), "labels": pad([s["labels"] for s in samples], IGNORED)}


class _WithTokenizer:
    """Base of collators that pad with the padding token of ``tokenizer``, which the data set sets."""

    def __init__(self, tokenizer: Any = None) -> None:
        self.tokenizer = tokenizer

    def _texts(self, samples: Samples) -> Batch:
        rows = [sample["token_ids"] for sample in samples]
        value = 0 if self.tokenizer is None else self.tokenizer.pad_token_id
        return {"token_ids": pad(rows, value), "attention_mask": pad_mask(rows)}


class TextPaddingDataCollator(_WithTokenizer):
    """``token_ids`` and ``attention_mask`` (B, L), and ``labels`` (B,), one per text."""

    def __call__(self, samples: Samples) -> Batch:
        batch = self._texts(samples)
        if "labels" in samples[0]:
            batch["labels"] = torch.as_tensor([sample["labels"] for sample in samples], device="cpu")
        return batch


class SequenceLabelingDataCollator(_WithTokenizer):
    """``token_ids``, ``attention_mask`` and ``labels`` (B, L), one per token; -100 at padding."""

    def __call__(self, samples: Samples) -> Batch:
        return {**self._texts(samples), "labels": pad([s["labels"] for s in samples], IGNORED)}


class TextGenerationDataCollator(SequenceLabelingDataCollator):
    """``token_ids``, ``attention_mask`` and ``labels`` (B, L): each label is the token at its position, or -100."""


class SpeechRecognitionDataCollator(_WithBlank):
    """``input_features`` (B, T, F) and ``attention_mask`` (B, T), and ``labels`` (B, L) padded with
    ``pad_token_id``, the blank of CTC.
    """

    def __call__(self, samples: Samples) -> Batch:
        rows = [sample["input_features"] for sample in samples]
        return {"input_features": pad(rows, 0.0), "attention_mask": pad_mask(rows), **self._labels(samples)}


def _images(samples: Samples) -> Tensor:
    images = [torch.as_tensor(sample["pixel_values"], device="cpu") for sample in samples]
    if len({image.shape for image in images}) > 1:
        shapes = sorted({tuple(image.shape) for image in images})
        raise DataError(
            f"pixel_values: images of one batch have the shapes (channels, height, width) {shapes}; set "
            "size=(width, height) of the image processor, which resizes them."
        )
    return torch.stack(images)
