"""The example that writes down what it hears: its promises, checked on what it wrote, by another package's rates."""

import csv
import re
from collections.abc import Callable
from pathlib import Path

import jiwer
import pytest

from trainwright.models import CTCSpeechRecognition, Model

EXAMPLE = Path(__file__).parents[2] / "examples" / "tasks" / "recognize_speech.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, run_python: Callable) -> Path:
    """Where it has run; what it printed is in ``printed.txt``."""
    folder = tmp_path_factory.mktemp("speech")
    done = run_python("-W", "error", EXAMPLE, "--quick", cwd=folder, timeout=280)
    (folder / "printed.txt").write_text(done.stdout, encoding="utf-8")
    return folder


def rows(folder: Path, split: str) -> list[dict[str, str]]:
    path = folder / "output" / "recognize_speech" / "data" / f"{split}.csv"
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def rates(folder: Path, split: str) -> tuple[float, float]:
    """CER and WER of the saved model, asked about sounds by their paths."""
    output = folder / "output" / "recognize_speech"
    model = Model.load(output / "model")
    assert isinstance(model, CTCSpeechRecognition)
    said = [row["text"] for row in rows(folder, split)]
    paths = [output / "data" / "audio" / row["audio_path"] for row in rows(folder, split)]
    heard = [out["text"] for out in model.predict(paths)]
    return float(jiwer.cer(said, heard)), float(jiwer.wer(said, heard))


@pytest.mark.exhaustive
def test_the_saved_model_knows_its_training_sounds_and_hears_new_ones_with_few_mistakes(folder: Path) -> None:
    assert rates(folder, "train") == (0, 0)
    cer, wer = rates(folder, "test")
    assert cer <= 0.05
    assert wer <= 0.15


@pytest.mark.exhaustive
def test_no_new_sound_was_trained_on(folder: Path) -> None:
    train, test = ([row["text"] for row in rows(folder, split)] for split in ("train", "test"))
    assert (len(train), len(test)) == (360, 60)
    assert len({*train, *test}) == 360 + 60


@pytest.mark.exhaustive
def test_it_prints_the_rates_of_the_model_that_it_saves(folder: Path) -> None:
    printed = (folder / "printed.txt").read_text(encoding="utf-8")
    found = [float(rate) for rate in re.findall(r"[CW]ER ([\d.]+)", printed)]
    assert found == [0, 0, *(pytest.approx(rate, abs=1e-4) for rate in rates(folder, "test"))]
