"""SpeechRecognitionDataset: wave files and what is said in them."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from trainwright.config.errors import ConfigError
from trainwright.data import AudioFeatureExtractor, DataError, Dataset, SpeechRecognitionDataset

EXTRACTOR = AudioFeatureExtractor(sampling_rate=8000, n_mels=20, n_fft=256, hop_length=100)


@pytest.fixture
def sounds(tmp_path: Path, make: Callable) -> Path:
    for name, seconds in (("a", 0.1), ("b", 0.2)):
        tone = np.sin(2 * np.pi * 440 * np.arange(int(8000 * seconds)) / 8000) / 2
        make("wave", tmp_path / "audio" / f"{name}.wav", tone)
    make("csv", tmp_path / "train.csv", ["audio_path", "text"], [["a.wav", "ya"], ["b.wav", "بله"]])
    return tmp_path


def test_sounds_and_texts(sounds: Path) -> None:
    dataset = Dataset.load(sounds, "train", EXTRACTOR)
    assert isinstance(dataset, SpeechRecognitionDataset)
    assert dataset.config.id2label == dict(enumerate(["", *sorted("yaبله")]))
    sample = dataset[0]
    assert torch.equal(sample["input_features"], EXTRACTOR.features_of(sounds / "audio" / "a.wav"))
    assert [dataset.config.id2label[i] for i in sample["labels"]] == ["y", "a"]
    batch = dataset.data_collator([dataset[0], dataset[1]])
    assert batch["input_features"].shape == (2, 17, 20)
    assert batch["attention_mask"].sum(dim=1).tolist() == [9, 17]
    assert batch["labels"].shape == (2, 3)
    assert batch["labels"][0, -1] == 0


def test_bad_rows_are_named(sounds: Path) -> None:
    with open(sounds / "train.csv", "a", encoding="utf-8") as file:
        file.write("c.wav,ya\na.wav,\na.wav,yaya\n")
    with pytest.raises(DataError) as caught:
        Dataset.load(sounds, "train", max_length=3)
    for part in (
        "line 4: there is no audio file 'c.wav'",
        "line 5: the label is empty",
        "line 6: the label 'yaya' has 4",
    ):
        assert part in str(caught.value)


def test_a_sound_that_cannot_be_read_tells_its_row(sounds: Path) -> None:
    (sounds / "audio" / "b.wav").write_bytes(b"no sound")
    with pytest.raises(DataError, match=r"train\.csv, line 3: .*b\.wav"):
        Dataset.load(sounds, "train", EXTRACTOR)[1]
    with pytest.raises(ConfigError, match="needs a preprocessor with an audio feature extractor"):
        Dataset.load(sounds, "train")[0]
