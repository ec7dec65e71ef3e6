"""examples/tasks/generate_text.py learns to write the words of names that it has not seen."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "examples" / "tasks" / "generate_text.py"


@pytest.mark.exhaustive
def test_names_are_read_better_than_by_the_nearest_known_name(run_python: Callable, tmp_path: Path) -> None:
    done = run_python("-W", "error", PROGRAM, "--quick", cwd=tmp_path)
    for metric in ("rougeL", "bleu"):
        score, nearest = map(float, re.search(rf"{metric}: (\S+) \(.*: (\S+)\)", done.stdout).groups())
        assert nearest > 0.2  # not a baseline that knows nothing
        assert score > nearest + 0.1, metric  # 0.78 against 0.34, and 0.85 against 0.37 were measured
    after, before = map(float, re.search(r"perplexity: (\S+) \(.*: (\S+)\)", done.stdout).groups())
    assert after < 2.5 < 30 < before  # there are about sixty characters

    rows = {
        split: read(tmp_path / "output" / "generate_text" / "data" / f"{split}.jsonl") for split in ("train", "test")
    }
    assert [len(some) for some in rows.values()] == [2600, 200]
    assert not {row["target"] for row in rows["train"]} & {row["target"] for row in rows["test"]}

    from trainwright.models import Model

    model = Model.load(tmp_path / "output" / "generate_text" / "run" / "final_epoch")
    answers = [output.text for output in model.predict([row["source"] + "\n" for row in rows["test"]])]
    right = sum(answer == row["target"] for answer, row in zip(answers, rows["test"], strict=True)) / len(answers)
    (printed,) = map(float, re.search(r"exact match: (\S+)", done.stdout).groups())
    assert abs(right - printed) < 6e-4


def read(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
