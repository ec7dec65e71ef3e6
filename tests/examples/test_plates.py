"""The example that reads plates: what it promises, checked on what it wrote, by another package's CER."""

import csv
import re
from collections.abc import Callable
from pathlib import Path

import jiwer
import pytest

from trainwright.models import CRNNImage2Text, Model

EXAMPLE = Path(__file__).parents[2] / "examples" / "tasks" / "read_plates.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, run_python: Callable) -> Path:
    """Where it has run; what it printed is in ``printed.txt``."""
    folder = tmp_path_factory.mktemp("plates")
    done = run_python("-W", "error", EXAMPLE, "--quick", cwd=folder, timeout=280)
    (folder / "printed.txt").write_text(done.stdout, encoding="utf-8")
    return folder


def rows(folder: Path, split: str) -> list[dict[str, str]]:
    with open(folder / "output" / "read_plates" / "data" / f"{split}.csv", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def cer(folder: Path, split: str) -> float:
    """Of the saved model, asked about pictures by their paths."""
    output = folder / "output" / "read_plates"
    model = Model.load(output / "model")
    assert isinstance(model, CRNNImage2Text)
    read = model.predict([output / "data" / "images" / row["image_path"] for row in rows(folder, split)])
    return float(jiwer.cer([row["label"] for row in rows(folder, split)], [out["text"] for out in read]))


@pytest.mark.exhaustive
def test_the_saved_model_reads_its_training_plates_without_a_mistake_and_new_ones_with_few(folder: Path) -> None:
    assert cer(folder, "train") == 0
    assert cer(folder, "test") <= 0.05


@pytest.mark.exhaustive
def test_no_new_plate_was_trained_on(folder: Path) -> None:
    train, test = ([row["label"] for row in rows(folder, split)] for split in ("train", "test"))
    assert (len(train), len(test)) == (256, 64)
    assert len({*train, *test}) == 256 + 64


@pytest.mark.exhaustive
def test_it_prints_the_rates_of_the_model_that_it_saves(folder: Path) -> None:
    printed = (folder / "printed.txt").read_text(encoding="utf-8")
    rates = [float(rate) for rate in re.findall(r"CER ([\d.]+)", printed)]
    assert rates == [0, pytest.approx(cer(folder, "test"), abs=1e-4)]
