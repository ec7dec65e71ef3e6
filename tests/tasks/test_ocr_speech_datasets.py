"""OCRDataset: own images and a CSV are enough; what is wrong with them is found before the first step."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.tasks.conftest import PLATES
from trainwright.base.errors import ConfigError, ConfigKeyError
from trainwright.data import (
    AudioFeatureExtractor,
    DataError,
    Dataset,
    ImageProcessor,
    ImageProcessorConfig,
    OCRDataset,
    OCRDatasetConfig,
    PreprocessorsContainer,
    SpeechRecognitionDataset,
    TextTokenizer,
)

PROCESSOR = ImageProcessor(ImageProcessorConfig(size=(64, 32), gray_scale=True))


def test_own_images_and_a_csv_are_enough(plates: Path) -> None:
    train = Dataset.load(plates, split="train")
    test = Dataset.load(plates, split="test")
    assert isinstance(train, OCRDataset)
    assert train.data == [
        {"image_path": str(plates / "images" / f"train_{n}.png"), "label": text}
        for n, text in enumerate(PLATES["train"])
    ]
    characters = sorted(set("".join(PLATES["train"] + PLATES["test"])))  # those of test, too
    assert train.config.id2label == dict(enumerate(["", *characters])) == test.config.id2label


def test_samples_and_batches(plates: Path) -> None:
    dataset = OCRDataset.load(plates, "train", PROCESSOR)
    sample = dataset[0]
    wanted = PROCESSOR(plates / "images" / "train_0.png", return_tensors="torch")["pixel_values"][0]
    assert torch.equal(sample["pixel_values"], wanted)
    assert [dataset.config.id2label[i] for i in sample["labels"]] == list("12A34")
    batch = dataset.data_collator([dataset[n] for n in range(3)])
    assert batch["pixel_values"].shape == (3, 1, 32, 64)
    texts = ["".join(dataset.config.id2label[i] for i in row) for row in batch["labels"].tolist()]
    assert texts == ["12A34", "98B", "7"]  # the padding is the blank


def test_the_preprocessor_may_come_later(plates: Path) -> None:
    dataset = OCRDataset.load(plates, "train")
    with pytest.raises(ConfigError, match=r"OCRDataset: .*image processor.*Trainer"):
        dataset[0]
    dataset.preprocessor = PreprocessorsContainer([PROCESSOR])
    assert dataset[0]["pixel_values"].shape == (1, 32, 64)


def test_persian_plates(tmp_path: Path, make: Callable) -> None:
    for name in ("a.png", "b.png"):
        make("plate", tmp_path / "train" / "images" / name, "x")
    make(
        "csv",
        tmp_path / "train" / "labels.csv",
        ["image_path", "label"],
        [["a.png", "۱۲ب۳۴۵۶۷"], ["images/b.png", "۹۸ی"]],
    )
    plain = Dataset.load(tmp_path, split="train", max_length=8)
    turned = Dataset.load(tmp_path, split="train", max_length=8, reverse_digits=True)
    assert [row["label"] for row in plain.data] == ["۱۲ب۳۴۵۶۷", "۹۸ی"]
    assert [row["label"] for row in turned.data] == ["۲۱ب۷۶۵۴۳", "۸۹ی"]
    assert plain.config.id2label == turned.config.id2label == dict(enumerate(["", *sorted("بی۱۲۳۴۵۶۷۸۹")]))
    mirrored = Dataset.load(tmp_path, split="train", reverse_text=True, reverse_digits=True)
    assert mirrored.data[0]["label"] == "۳۴۵۶۷ب۱۲"
    assert Path(plain.data[1]["image_path"]) == tmp_path / "train" / "images" / "b.png"


def test_other_tables_may_lie_beside(plates: Path, make: Callable) -> None:
    make("csv", plates / "cameras.csv", ["camera", "place"], [[1, "north"]])
    (plates / "valid.txt").write_text("none, of, these\n")
    assert "n" not in Dataset.load(plates, split="train").config.id2label.values()


def test_rows_as_json(plates: Path, make: Callable) -> None:
    make("jsonl", plates / "extra.jsonl", [{"image_path": "train_0.png", "label": 120}])
    assert Dataset.load(plates, split="extra").data[0]["label"] == "120"
    make("jsonl", plates / "extra.jsonl", [{"image_path": "train_0.png", "label": None}])
    with pytest.raises(DataError, match=r"extra\.jsonl, line 1: the label is empty"):
        Dataset.load(plates, split="extra")


def test_letters_are_composed_however_they_were_typed(tmp_path: Path, make: Callable) -> None:
    make("plate", tmp_path / "a.png", "x")
    make("csv", tmp_path / "train.csv", ["image_path", "label"], [["a.png", "cafe\u0301"]])
    dataset = OCRDataset(OCRDatasetConfig(path=str(tmp_path), id2label=["", "a", "c", "f", "é"]), "train", PROCESSOR)
    assert dataset[0]["labels"] == [2, 1, 3, 4]


def test_blanks_and_direction_marks_are_no_part_of_a_label(plates: Path, sounds: Path, make: Callable) -> None:
    make("csv", plates / "train.csv", ["image_path", "label"], [["train_0.png", "\u200f 12\u200eA \u202c"]])
    ocr = Dataset.load(plates, "train", PROCESSOR, id2label=["", "1", "2", "A"])
    assert ocr[0]["labels"] == [1, 2, 3]
    make("csv", sounds / "train.csv", ["audio_path", "text"], [["a.wav", " y\u2067a\u2069 b\n"]])
    speech = Dataset.load(sounds, "train", EXTRACTOR)
    assert [speech.config.id2label[i] for i in speech[0]["labels"]] == list("ya b")


@pytest.mark.parametrize("value", [["1", "2"], {"text": "1"}])
def test_a_list_is_no_label(plates: Path, make: Callable, value: object) -> None:
    (plates / "train.csv").unlink()
    make("jsonl", plates / "train.jsonl", [{"image_path": "train_0.png", "label": value}])
    with pytest.raises(DataError, match=rf"train\.jsonl, line 1: label is a {type(value).__name__}"):
        Dataset.load(plates, "train")


def test_all_bad_rows_are_named_before_the_first_step(plates: Path) -> None:
    with open(plates / "train.csv", "a", encoding="utf-8") as file:
        file.write("absent.png,12\ntrain_0.png,\ntrain_0.png,1234567890\ntrain_0.png,1\u200cz\n")
    with pytest.raises(DataError) as caught:
        OCRDataset.load(plates, "train", max_length=8, id2label=["", *"0123456789ABC"])
    text = str(caught.value)
    for part in (
        "train.csv, line 6: there is no image 'absent.png', looked for in",
        "train.csv, line 7: the label is empty",
        "train.csv, line 8: the label '1234567890' has 10 characters; max_length is 8",
        "train.csv, line 9: the label '1\\u200cz' has characters that are missing in id2label: 'z' (U+007A ",
        "U+200C ZERO WIDTH NON-JOINER",
        "4 of 8 rows cannot be used",
    ):
        assert part in text


def test_a_picture_that_cannot_be_read_tells_its_row(plates: Path) -> None:
    (plates / "images" / "train_2.png").write_bytes(b"no picture")
    dataset = OCRDataset.load(plates, "train", PROCESSOR)
    with pytest.raises(DataError, match=r"train\.csv, line 4: .*train_2\.png"):
        dataset[2]


def test_rows_with_some_characters_can_be_left_out(plates: Path) -> None:
    dataset = OCRDataset.load(plates, "train", invalid_characters=["A"])
    assert [row["label"] for row in dataset.data] == ["98B", "7"]
    assert "A" not in dataset.config.id2label.values()


def test_labels_by_a_tokenizer(plates: Path) -> None:
    tokenizer = TextTokenizer.train(PLATES["train"], level="char")
    dataset = OCRDataset.load(plates, "train", [PROCESSOR, tokenizer], text_split_type="tokenize", max_length=4)
    assert dataset[0]["labels"] == tokenizer.encode("12A34", max_length=4)
    labels = dataset.data_collator([dataset[0], dataset[2]])["labels"]
    assert labels[1].tolist() == [*tokenizer.encode("7"), -100]


def test_rows_of_ones_own(plates: Path) -> None:
    class Upside(OCRDataset):
        def _load(self, split: str | None) -> list[Any]:
            return [{"image_path": plates / "images" / "train_0.png", "label": "ba"}]

    dataset = Upside(OCRDatasetConfig(path=None), "train", PROCESSOR)
    assert dataset.config.id2label == {0: "", 1: "a", 2: "b"}
    assert dataset[0]["labels"] == [2, 1]


def test_pictures_of_several_folders_and_systems(tmp_path: Path, make: Callable) -> None:
    for name in ("train/a.png", "images/sub/b.png", "c.png"):
        make("plate", tmp_path / name, "x")
    rows = [["a.png", "1"], ["sub\\b.png", "1"], ["c.png", "1"], [tmp_path / "c.png", "1"], ["../c.png", "1"]]
    make("csv", tmp_path / "train" / "labels.csv", ["image_path", "label"], rows)
    found = [Path(row["image_path"]) for row in OCRDataset.load(tmp_path, "train").data]
    c = tmp_path / "c.png"
    assert found == [tmp_path / "train" / "a.png", tmp_path / "images" / "sub" / "b.png", c, c, c]


def test_settings_that_cannot_be_are_refused(plates: Path) -> None:
    with pytest.raises(ConfigKeyError, match=r"no split 'tst'. Did you mean 'test'\?"):
        Dataset.load(plates, split="tst")
    with pytest.raises(ConfigKeyError, match=r"max_len.*mean 'max_length'"):
        Dataset.load(plates, split="test", max_len=8)


def test_sizes_are_known_without_reading_a_picture(plates: Path) -> None:
    for path in (plates / "images").iterdir():
        path.write_bytes(b"")
    assert len(Dataset.load(plates, split="train")) == 4


def test_unequal_pictures_are_reported_in_the_batch(plates: Path, make: Callable) -> None:
    make("plate", plates / "images" / "train_1.png", "98B", size=(90, 24))
    dataset = OCRDataset.load(plates, "train", ImageProcessor())
    with pytest.raises(DataError, match="of the image processor"):
        dataset.data_collator([dataset[0], dataset[1]])
    assert dataset[0]["pixel_values"].shape == (3, 24, 80)


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
