"""``trainwright eval``: the metrics of a checkpoint equal those of the training, and its predictions give them."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.conftest import FinishedRun
from trainwright.cli.main import main

SCRIPT = """
import torch
from torch.utils.data import TensorDataset
from trainwright import Trainer, TrainingConfig

def build_trainer():
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(16, 4), torch.randint(0, 2, (16,)))
    config = TrainingConfig(output_dir="run", num_epochs=2, batch_size=4, learning_rate=0.1, ema={"decay": 0.9})
    return Trainer(torch.nn.Linear(4, 2), config, data, data)

if __name__ == "__main__":
    import json
    print(json.dumps(build_trainer().train()))
"""


@pytest.fixture
def evaluate(run_python: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    return lambda *arguments, **how: run_python(
        "-m", "trainwright.cli.main", "eval", *arguments, **{"cwd": tmp_path, **how}
    )


def test_the_metrics_are_those_of_the_training(finished: FinishedRun, evaluate, read_rows, contents) -> None:
    before = contents(finished.folder)
    project = finished.config.parents[1]  # the saved configuration uses the modules of a project in the working folder
    found = json.loads(evaluate(finished.folder, "--checkpoint", "model_final", "--json", cwd=project).stdout)
    assert found["metrics"]["Acc@1"] == read_rows(finished.folder)[-1]["Acc@1"]
    assert found["iteration"] == 60
    assert contents(finished.folder) == before


def test_the_best_checkpoint_is_the_default_and_predictions_give_its_metric(
    finished: FinishedRun, evaluate, read_rows, tmp_path: Path
) -> None:
    files = ("--predictions", tmp_path / "p.csv", "--metrics", tmp_path / "m.json")
    done = evaluate(finished.folder / "config.yaml", *files, cwd=finished.config.parents[1])
    best = max(row["Acc@1"] for row in read_rows(finished.folder) if "Acc@1" in row)
    assert json.loads((tmp_path / "m.json").read_text())["metrics"]["Acc@1"] == best
    head, *lines = done.stdout.splitlines()[-4:]
    assert "model_best (after " in done.stdout
    assert any(line.split() == ["Acc@1", f"{best:.5g}", "%"] for line in (head, *lines))
    rows = list(csv.DictReader((tmp_path / "p.csv").read_text().splitlines()))
    assert [int(row["sample"]) for row in rows] == list(range(360))
    assert 100 * sum(row["prediction"] == row["labels"] for row in rows) / len(rows) == pytest.approx(best)
    assert len(json.loads(rows[0]["prediction_scores"])) == 10


@pytest.mark.exhaustive
def test_a_config_file_evaluates_its_folder_on_several_processes(finished: FinishedRun, run_python, tmp_path) -> None:
    arguments = [finished.config, f"train.output_dir={finished.folder}", "--checkpoint", "model_final"]
    launch = ["launch", "-n", "2", "eval", *arguments, "--predictions", "p.jsonl", "--metrics", "m.json"]
    run_python("-m", "trainwright.cli.main", *launch, cwd=tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    accuracy = json.loads((tmp_path / "m.json").read_text())["metrics"]["Acc@1"]
    assert [row["sample"] for row in rows] == list(range(360))
    assert 100 * sum(row["prediction"] == row["labels"] for row in rows) / 360 == pytest.approx(accuracy)


@pytest.mark.exhaustive
def test_a_run_of_the_python_api_with_averaged_weights(evaluate, run_python, tmp_path: Path) -> None:
    (tmp_path / "my_script.py").write_text(SCRIPT)
    trained = json.loads(run_python("my_script.py", cwd=tmp_path).stdout.splitlines()[-1])
    asked = evaluate("run", code=2).stderr
    assert "--trainer train.py:build_trainer" in asked
    assert "trainer.load('run/checkpoints/model_best')" in asked
    files = ("--trainer", "my_script.py", "--predictions", "p.jsonl")
    done = evaluate("run", "--checkpoint", "final_epoch", *files, "--json")
    assert json.loads(done.stdout)["metrics"] == pytest.approx(trained)
    rows = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    torch.manual_seed(0)
    torch.randn(16, 4)
    assert [row["label"] for row in rows] == torch.randint(0, 2, (16,)).tolist()
    assert "Did you mean 'build_trainer'?" in evaluate("run", "--trainer", "my_script.py:build_traner", code=2).stderr
    assert "overrides are for config files" in evaluate("run", "seed=1", "--trainer", "my_script.py", code=2).stderr


@pytest.mark.parametrize(
    ("arguments", "fact"),
    [
        (["{run}", "--predictions", "p.txt"], ".jsonl, .csv, .parquet"),
        (["{run}", "--predictions", "nowhere/p.csv"], "no folder nowhere"),
        (["{run}", "--metrics", "nowhere/m.json"], "no folder nowhere"),
    ],
)
def test_wrong_arguments_exit_with_2(
    finished: FinishedRun, arguments: list[str], fact: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", *(text.format(run=finished.folder) for text in arguments)]) == 2
    assert fact in capsys.readouterr().err
