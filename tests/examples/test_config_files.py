"""The example config files train, and do what they show."""

import json
from pathlib import Path

import pytest

from trainwright.cli.main import main

FILES = Path(__file__).parents[2] / "examples" / "config_files"


def test_a_callback_and_a_hook_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", str(FILES / "own_hooks.py"), "train.hooks.0.each=40"]) == 0
    rows = [json.loads(line) for line in Path("output/own_hooks/metrics.json").read_text().splitlines()]
    norms = [row["iteration"] for row in rows if "weight_norm" in row]
    accuracies = [row["Acc@1"] for row in rows if "Acc@1" in row]
    assert norms[0] == 39
    assert len(accuracies) == 4
    assert accuracies[-1] > 85
