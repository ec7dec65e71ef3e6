"""Predictions as rows, and their files read by other programs."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from tests.toys import Samples
from trainwright.base.errors import ConfigError
from trainwright.evaluation.prediction_table import (
    PredictionRecorder,
    prediction_rows,
    with_facts,
    with_names,
    write_rows,
)

INPUTS = {"images": torch.zeros(2, 3), "labels": torch.tensor([1, 0]), "ids": ["a", "b"]}


def test_a_row_has_the_number_the_id_the_label_and_the_outputs_of_a_sample() -> None:
    outputs = {"logits": torch.tensor([[0.0, 1.0], [0.5, 2.0]]), "loss": torch.tensor(0.3), "text": ["x", "y"]}
    assert prediction_rows(INPUTS, outputs, 10) == [
        {"sample": 10, "labels": 1, "ids": "a", "prediction": 1, "logits": [0.0, 1.0], "text": "x"},
        {"sample": 11, "labels": 0, "ids": "b", "prediction": 1, "logits": [0.5, 2.0], "text": "y"},
    ]


def test_outputs_without_names_and_large_outputs() -> None:
    assert prediction_rows((), torch.tensor([[0.0, 1.0]])) == [{"sample": 0, "prediction": 1, "scores": [0.0, 1.0]}]
    assert prediction_rows((), torch.tensor([2.5, 3.5])) == [{"sample": 0, "output": 2.5}, {"sample": 1, "output": 3.5}]
    assert prediction_rows(INPUTS, {"image": torch.zeros(2, 3, 8, 8), "z": torch.zeros(2, dtype=torch.bfloat16)})[
        0
    ] == {
        "sample": 0,
        "labels": 1,
        "ids": "a",
        "z": 0.0,
    }


def test_the_recorder_numbers_each_data_set() -> None:
    recorder = PredictionRecorder()
    for _ in range(2):
        recorder.reset()
        for _ in range(2):
            recorder.process(INPUTS, {"scores": torch.zeros(2, 2)})
        assert recorder.evaluate() == {}
    assert [[row["sample"] for row in rows] for rows in recorder.tables] == [[0, 1, 2, 3]] * 2


PHOTOS = Samples([0, 1], [1, 0])
PHOTOS.paths = ("a.png", "b.png")  # type: ignore[attr-defined]
ROWS = [{"sample": 0, "prediction": 1}, {"sample": 1, "prediction": 0}]


def test_names_of_samples_come_from_the_data_set_if_the_order_is_known() -> None:
    named = [{"sample": 0, "name": "a.png", "prediction": 1}, {"sample": 1, "name": "b.png", "prediction": 0}]
    assert with_names(ROWS, DataLoader(PHOTOS)) == named
    assert with_names(ROWS, DataLoader(PHOTOS, shuffle=True)) == ROWS
    assert with_names(ROWS, [1, 2]) == ROWS


def test_ids_and_labels_come_from_the_samples() -> None:
    assert with_facts(ROWS, PHOTOS) == [
        {"sample": 0, "name": "a.png", "label": 1, "prediction": 1},
        {"sample": 1, "name": "b.png", "label": 0, "prediction": 0},
    ]
    samples = [{"x": 3, "id": "first", "labels": np.int64(2)}, {"id": "second", "labels": torch.tensor([1, 2])}]
    assert with_facts([{"sample": 0, "labels": 0.5}, {"sample": 1, "labels": 0.25}], samples) == [
        {"sample": 0, "id": "first", "labels": 2, "output_labels": 0.5},
        {"sample": 1, "id": "second", "labels": [1, 2], "output_labels": 0.25},
    ]
    large = [{"target": torch.zeros(200), "text": "x"}, torch.zeros(3)]
    assert with_facts(ROWS, large) == ROWS
    assert with_facts(ROWS, [1]) == ROWS


def test_files_have_the_rows(tmp_path: Path) -> None:
    rows = [{"sample": 0, "text": 'a "b",\nc', "scores": [0.5, 1.0]}, {"sample": 1, "text": "é", "scores": [1.0, 2.0]}]
    for suffix in (".jsonl", ".csv", ".parquet"):
        write_rows(tmp_path / f"rows{suffix}", rows)
    assert [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()] == rows
    with open(tmp_path / "rows.csv", newline="") as file:
        found = [
            {**row, "sample": int(row["sample"]), "scores": json.loads(row["scores"])} for row in csv.DictReader(file)
        ]
    assert found == rows
    pandas = pytest.importorskip("pandas")
    assert pandas.read_parquet(tmp_path / "rows.parquet")["text"].tolist() == ['a "b",\nc', "é"]
    # An unknown kind of file.
    with pytest.raises(ConfigError, match=r"Did you mean '\.jsonl'"):
        write_rows(tmp_path / "rows.json", [])
