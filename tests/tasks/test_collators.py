"""Batches of samples: padded, masked, and the samples stay as they were."""

import copy

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from trainwright.data import (
    CharLevelOCRDataCollator,
    ImageCaptioningDataCollator,
    SequenceLabelingDataCollator,
    SpeechRecognitionDataCollator,
    TextGenerationDataCollator,
    TextPaddingDataCollator,
    TextTokenizer,
)
from trainwright.tasks.padding import pad, pad_mask

SAMPLES = [
    {
        "pixel_values": torch.ones(1, 2, 3),
        "token_ids": [5, 6, 7],
        "labels": [1, 2, 3],
        "input_features": torch.ones(4, 2),
    },
    {"pixel_values": torch.zeros(1, 2, 3), "token_ids": [8], "labels": [4], "input_features": torch.ones(1, 2)},
]
COLLATORS = [
    CharLevelOCRDataCollator(),
    ImageCaptioningDataCollator(),
    SequenceLabelingDataCollator(),
    TextGenerationDataCollator(),
    SpeechRecognitionDataCollator(),
]


@pytest.mark.parametrize("collator", COLLATORS, ids=lambda c: type(c).__name__)
def test_samples_are_not_changed(collator: object) -> None:
    before = copy.deepcopy(SAMPLES)
    collator(SAMPLES)  # type: ignore[operator]
    collator(SAMPLES)  # type: ignore[operator]
    assert repr(SAMPLES) == repr(before)


def test_pictures_and_characters() -> None:
    batch = CharLevelOCRDataCollator(pad_token_id=0)(SAMPLES)
    assert batch.keys() == {"pixel_values", "labels"}
    assert batch["pixel_values"].shape == (2, 1, 2, 3)
    assert batch["labels"].tolist() == [[1, 2, 3], [4, 0, 0]]
    assert CharLevelOCRDataCollator()([{"pixel_values": torch.ones(1, 2, 2)}]).keys() == {"pixel_values"}
    assert ImageCaptioningDataCollator()(SAMPLES)["labels"].tolist() == [[1, 2, 3], [4, -100, -100]]


def test_texts() -> None:
    tokenizer = TextTokenizer(vocabulary=["x"], unk_token=None, pad_token="[END]", eos_token="[END]", bos_token="[B]")
    tokenizer.config.pad_token = "x"
    batch = TextPaddingDataCollator(tokenizer)([{"token_ids": [5, 6], "labels": 1}, {"token_ids": [7], "labels": 0}])
    assert batch["token_ids"].tolist() == [[5, 6], [7, tokenizer.token_id("x")]]
    assert batch["attention_mask"].tolist() == [[1, 1], [1, 0]]
    assert batch["labels"].tolist() == [1, 0]
    assert batch["labels"].dtype == torch.int64


@pytest.mark.parametrize(
    "collator", [SequenceLabelingDataCollator(), TextGenerationDataCollator()], ids=["tags", "text"]
)
def test_labels_of_tokens_are_ignored_at_padding(collator: SequenceLabelingDataCollator) -> None:
    batch = collator(SAMPLES)
    assert batch["labels"].tolist() == [[1, 2, 3], [4, -100, -100]]
    assert batch["token_ids"].tolist() == [[5, 6, 7], [8, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]


def test_sounds() -> None:
    batch = SpeechRecognitionDataCollator()(SAMPLES)
    assert batch["input_features"].shape == (2, 4, 2)
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 0, 0, 0]]
    assert batch["labels"].tolist() == [[1, 2, 3], [4, 0, 0]]


def test_rows_of_features_stay_floats() -> None:
    rows = [torch.ones(2, 3), torch.ones(4, 3)]
    got = pad(rows, 0.0)
    assert got.dtype == torch.float32
    assert got.tolist() == pad_sequence(rows, batch_first=True).tolist()
    # Empty rows are rows.
    assert pad([[], [1, 2]], 9).tolist() == [[9, 9], [1, 2]]
    assert pad([[], []], 9).tolist() == [[9], [9]]
    assert pad_mask([[], [1]]).tolist() == [[0], [1]]
