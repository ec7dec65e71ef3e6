"""The Dataset contract: one of one's own, sizes, loading by name, from a folder and from a hub."""

import dataclasses
import doctest
import importlib
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.hub_server import HubServer
from trainwright.base.errors import ConfigError, ConfigKeyError, ConfigTypeError, MissingFileError
from trainwright.checkpoint.hub import upload_folder
from trainwright.data import (
    Dataset,
    DatasetConfig,
    OCRDataset,
    OCRDatasetConfig,
    SequenceLabelingDataset,
    SpeechRecognitionDataset,
    TextClassificationDataset,
    TextGenerationDataset,
    register_dataset,
)
from trainwright.data.collate import collate
from trainwright.data.errors import DataError


@dataclasses.dataclass
class SquaresConfig(DatasetConfig):
    name = "test_squares"
    largest: int = 9


@register_dataset("test_squares", config_class=SquaresConfig)
class Squares(Dataset):
    def _load(self, split: str | None) -> list[int]:
        return list(range(self.config.largest + 1))

    def __getitem__(self, index: int) -> dict[str, Any]:
        number = self.row(index)
        return {"inputs": torch.tensor([float(number)]), "labels": number**2}


def test_one_of_ones_own(tmp_path: Path) -> None:
    dataset = Squares(SquaresConfig(), "train", largest=4)
    assert len(dataset) == 5
    assert dataset[-1]["labels"] == 16
    assert dataset.preprocessor is None
    assert dataset.data_collator is collate
    assert dataset.data_collator([dataset[1], dataset[2]])["labels"].tolist() == [1, 4]
    dataset.config.save(tmp_path)
    assert (tmp_path / "dataset_config.yaml").read_text().startswith("name: test_squares\nconfig_type: dataset\n")
    loaded = Dataset.load(tmp_path, split="test")
    assert type(loaded) is Squares
    assert (len(loaded), loaded.split, loaded.config.path) == (5, "test", str(tmp_path))
    assert len(Dataset.load(tmp_path, largest=2)) == 3
    # The config given is not changed.
    config = SquaresConfig()
    assert Squares(config, max_size=3).config.max_size == 3
    assert config.max_size is None


@pytest.mark.parametrize(
    ("max_size", "length"), [(None, 100), (7, 7), (500, 100), (0.5, 50), (0.07, 7), (0.001, 1), (1.0, 100), (0.331, 34)]
)
def test_the_size_may_be_limited(max_size: float | None, length: int) -> None:
    dataset = Squares(SquaresConfig(largest=99, max_size=max_size))
    assert len(dataset) == length
    if isinstance(max_size, float) and max_size not in (0.07, 0.331):
        assert length == math.ceil(max_size * 100)
    assert [sample["labels"] for sample in dataset] == [n**2 for n in range(length)]
    for index in (length, -length - 1):
        with pytest.raises(IndexError, match=f"has {length} samples; index {index} is out of range"):
            dataset[index]


def test_what_is_wrong_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigTypeError, match="must be a SquaresConfig; got OCRDatasetConfig"):
        Squares(OCRDatasetConfig())
    with pytest.raises(ConfigKeyError, match=r"'?largst'?.*mean 'largest'"):
        Squares(SquaresConfig(), largst=3)
    with pytest.raises(ConfigError, match="has no rows"):
        Squares(SquaresConfig(largest=-1))
    (tmp_path / "dataset_config.yaml").write_text("name: test_squars\n")
    with pytest.raises(ConfigKeyError, match=r"dataset_config\.yaml.*'test_squars'.*mean 'test_squares'"):
        Dataset.load(tmp_path)
    (tmp_path / "dataset_config.yaml").write_text("name: test_squares\nlargst: 3\n")
    with pytest.raises(ConfigKeyError, match=r"dataset_config\.yaml.*largst"):
        Dataset.load(tmp_path)
    (tmp_path / "dataset_config.yaml").write_text("largest: 3\n")
    with pytest.raises(ConfigError, match="has no key 'name'"):
        Dataset.load(tmp_path)
    (tmp_path / "dataset_config.yaml").write_text("name: test_squares\n")
    with pytest.raises(ConfigTypeError, match=r"Squares, .*OCRDataset.*Squares\.load"):
        OCRDataset.load(tmp_path)
    with pytest.raises(MissingFileError, match="no such folder"):
        Dataset.load(tmp_path / "absent")
    with pytest.raises(ConfigError, match="register_dataset"):
        register_dataset("other", config_class=SquaresConfig)


def test_a_config_picks_the_class(plates: Path, tmp_path: Path) -> None:
    dataset = Dataset.load(plates, "train", config=OCRDatasetConfig(max_length=5), max_size=2)
    assert type(dataset) is OCRDataset
    assert (len(dataset), dataset.config.max_length, dataset.config.path) == (2, 5, str(plates))
    # A table without a header is asked for one.
    (tmp_path / "train.csv").write_text("a good film,pos\na bad film,neg\n")
    with pytest.raises(ConfigError, match=r"train.csv: its columns \(a good film, pos\).*If its header is missing"):
        Dataset.load(tmp_path)


def test_files_alone_are_known_by_their_columns(tmp_path: Path, plates: Path, make: Callable) -> None:
    make("csv", tmp_path / "texts" / "train.csv", ["text", "label"], [["good", "pos"], ["bad", "neg"]])
    make("jsonl", tmp_path / "tags" / "train.jsonl", [{"tokens": ["a", "b"], "tags": ["O", "X"]}])
    make("jsonl", tmp_path / "pairs" / "train.jsonl", [{"source": "a", "target": "b"}])
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "train.txt").write_text("once upon a time")
    make("wave", tmp_path / "sounds" / "a.wav", np.ones(100) / 2)
    make("csv", tmp_path / "sounds" / "train.csv", ["audio_path", "text"], [["a.wav", "hm"]])
    make("csv", tmp_path / "other" / "train.csv", ["x", "y"], [[1, 2]])
    kinds = {
        name: type(Dataset.load(tmp_path / name, "train")) for name in ("texts", "tags", "pairs", "plain", "sounds")
    }
    assert kinds == {
        "texts": TextClassificationDataset,
        "tags": SequenceLabelingDataset,
        "pairs": TextGenerationDataset,
        "plain": TextGenerationDataset,
        "sounds": SpeechRecognitionDataset,
    }
    assert type(Dataset.load(plates, split="test")) is OCRDataset
    with pytest.raises(ConfigError, match=r"columns \(x, y\) are not those .*ocr: image_path, label"):
        Dataset.load(tmp_path / "other", "train")
    make("csv", tmp_path / "classes" / "train.csv", ["text", "category"], [["good", "pos"]])
    assert type(Dataset.load(tmp_path / "classes", "train", label_field="category")) is TextClassificationDataset
    with pytest.raises(ConfigKeyError, match="no such key: label_fild"):
        Dataset.load(tmp_path / "classes", "train", label_fild="category")
    renamed = OCRDataset.load(
        make(
            "csv", tmp_path / "own" / "train.csv", ["file", "text"], [[plates / "images" / "train_0.png", "12A34"]]
        ).parent,
        images_paths_column="file",
        text_column="text",
    )
    assert renamed.data == [{"image_path": str(plates / "images" / "train_0.png"), "label": "12A34"}]


def test_a_folder_in_the_folder_by_its_name(tmp_path: Path, plates: Path, hub: HubServer) -> None:
    shutil.copytree(plates, tmp_path / "all" / "iran")
    dataset = Dataset.load(f"{tmp_path / 'all'}:iran", split="test")
    assert len(dataset) == 2
    assert dataset.config.path == f"{tmp_path / 'all'}:iran"
    with pytest.raises(MissingFileError, match=r"has no folder 'irak'; it has \['iran'\]"):
        Dataset.load(f"{tmp_path / 'all'}:irak", split="test")
    upload_folder(tmp_path / "all", "owner/plates", repo_type="dataset")
    assert len(Dataset.load("owner/plates:iran", split="test")) == 2


def test_from_a_hub_as_the_page_does(hub: HubServer, plates: Path, tmp_path: Path) -> None:
    OCRDatasetConfig(id2label={0: "", **dict(enumerate("0123456789ABC", start=1))}).save(plates)
    upload_folder(plates, "hezarai/persian-license-plate-v1", repo_type="dataset")
    shutil.rmtree(plates)
    dataset = Dataset.load("hezarai/persian-license-plate-v1", split="train", max_length=8, reverse_digits=True)
    assert dataset.config.path == "hezarai/persian-license-plate-v1"
    assert dataset.config.max_length == 8
    assert dataset.data[0]["label"] == "21A43"
    assert dataset.config.id2label[13] == "C"
    assert Path(dataset.data[0]["image_path"]).is_file()
    dataset.config.save(tmp_path / "saved")
    again = OCRDataset(OCRDatasetConfig.load(tmp_path / "saved"), "train")
    assert again.data == dataset.data
    with pytest.raises(
        MissingFileError, match=f"owner/absent.*dataset of this name could not be fetched from {hub.url}"
    ):
        Dataset.load("owner/absent", split="train")


def test_a_table_from_a_hub_names_no_file_outside_of_it(hub: HubServer, plates: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret.png"
    secret.write_bytes(next(plates.rglob("*.png")).read_bytes())
    repository = hub.folder("datasets", "owner/plates")
    repository.mkdir(parents=True)
    for name in (str(secret), "../../../../../../../../.." + str(secret)):
        (repository / "train.csv").write_text(f"image_path,label\n{name},123\n")
        with pytest.raises(DataError, match=r"train.csv"):
            Dataset.load("owner/plates", split="train")
    own = tmp_path / "own"
    own.mkdir()
    (own / "train.csv").write_text(f"image_path,label\n{secret},123\n")
    assert len(Dataset.load(own, split="train")) == 1  # one's own table may


MODULES = ["labels", "dataset", "image2text.image_processor", "padding", "preprocessor", "tokenizer"]


@pytest.mark.parametrize("name", [*(f"tasks.{module}" for module in MODULES), "checkpoint.hub"])
def test_examples_of_docstrings(name: str) -> None:
    result = doctest.testmod(importlib.import_module(f"trainwright.{name}"))
    assert result.attempted > 0
    assert result.failed == 0
