"""Collators: from a list of samples, which are dictionaries, to a batch, which is one. Samples are not changed.

B samples, L tokens or characters, C channels, H height, W width, T frames, F features; L and T are
the longest of the batch.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trainwright.data.errors import DataError
from trainwright.data.tasks.padding import pad, pad_mask

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
