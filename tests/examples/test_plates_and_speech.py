"""The examples that read plates and write down what they hear: their promises, checked by another package's rates."""

import csv
import re
from collections.abc import Callable
from pathlib import Path

import jiwer
import pytest

from trainwright.models import Model

TASKS = Path(__file__).parents[2] / "examples" / "tasks"


def rows(folder: Path, split: str) -> list[dict[str, str]]:
    with open(folder / "data" / f"{split}.csv", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("example", "files", "target", "lengths", "most"),
    [
        ("read_plates", ("images", "image_path"), "label", (256, 64), {"CER": 0.05}),
        ("recognize_speech", ("audio", "audio_path"), "text", (360, 60), {"CER": 0.05, "WER": 0.15}),
    ],
)
def test_the_saved_model_knows_its_training_samples_and_new_ones_with_few_mistakes(
    example: str,
    files: tuple[str, str],
    target: str,
    lengths: tuple[int, int],
    most: dict[str, float],
    tmp_path: Path,
    run_python: Callable,
) -> None:
    printed = run_python("-W", "error", TASKS / f"{example}.py", "--quick", cwd=tmp_path, timeout=280).stdout
    output = tmp_path / "output" / example
    model = Model.load(output / "model")
    expected, targets = [], []
    for split in ("train", "test"):
        samples = rows(output, split)
        right = [row[target] for row in samples]
        found = [out["text"] for out in model.predict([output / "data" / files[0] / row[files[1]] for row in samples])]
        rates = {name: float(getattr(jiwer, name.lower())(right, found)) for name in most}
        assert all(rate <= (most[name] if split == "test" else 0) for name, rate in rates.items())
        expected += [pytest.approx(rate, abs=1e-4) for rate in rates.values()]
        targets.append(right)
    assert [float(rate) for rate in re.findall(r"[CW]ER ([\d.]+)", printed)] == expected
    assert tuple(map(len, targets)) == lengths
    assert len({*targets[0], *targets[1]}) == sum(lengths), "no new sample was trained on"
