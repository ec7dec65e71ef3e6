"""What a report reads from a run's folder."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from trainwright.config.errors import MissingFileError
from trainwright.inspect.report.run_data import find_runs, read_loss_table, read_metrics


def test_a_run_of_each_api_is_read(runs_folder: Path) -> None:
    files, objects = find_runs([str(runs_folder)])
    assert [files.name, objects.name] == ["files", "objects"]
    assert [files.latest["api"], objects.latest["api"]] == ["config file", "Python"]
    assert files.status == objects.status == "finished"
    assert len(files.curves["total_loss"].x) == 24
    assert list(objects.curves["total_loss"].x) == list(range(1, 33))
    assert list(files.curves["Acc@1"].x) == [8, 16, 24]
    assert objects.curves["evaluation/loss"].x[-1] == 32
    assert files.settings["train.train_iter"] == 24
    assert objects.settings["learning.learning_rate"] == 0.1
    assert {entry.path.name for entry in files.checkpoints} >= {"model_0000007", "model_best", "model_final"}
    assert all(entry.is_complete for entry in [*files.checkpoints, *objects.checkpoints])
    assert objects.checkpoints


def test_the_loss_is_that_of_each_update(runs_folder: Path) -> None:
    (run,) = find_runs([str(runs_folder / "files")])
    rows = read_loss_table(runs_folder / "files" / "losses.csv")
    assert rows is not None
    assert run.curves["total_loss"].y.tolist() == rows[:, 1].tolist()
    # A row of metrics.json is the median of the updates before it.
    first = json.loads((runs_folder / "files" / "metrics.json").read_text().splitlines()[0])
    assert first["total_loss"] == pytest.approx(np.median(rows[:4, 1]))


def test_repeated_rows_incomplete_lines_and_missing_values(tmp_path: Path) -> None:
    rows = [
        {"iteration": 0, "a": 1.0},
        {"iteration": 1, "a": None},
        {"iteration": 0, "a": 2.0},
        {"iteration": 2, "a": 3},
    ]
    (tmp_path / "metrics.json").write_text("\n".join(map(json.dumps, rows)) + '\n[1]\n{"iteration": 3, "a": 4')
    curve = read_metrics(tmp_path / "metrics.json")["a"]
    assert curve.x.tolist() == [1, 3]
    assert curve.y.tolist() == [2.0, 3.0]
    assert curve.num_bad == 1


def test_losses_keep_all_digits_and_an_incomplete_line_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "losses.csv"
    path.write_text(f"iteration,total_loss\n0,{0.1 + 0.2!r}\n1,nan\n2,1e-7\n3,0.")
    table = read_loss_table(path)
    assert table is not None
    assert table[0].tolist() == [0, 0.1 + 0.2]
    assert math.isnan(table[1, 1])
    assert len(table) == 3
    path.write_text("iteration,other\n0,1\n")
    assert read_loss_table(path) is None


def test_names_are_the_ends_that_differ(tmp_path: Path) -> None:
    for place in ("a/run", "b/run"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "metrics.json").touch()
    found = find_runs([str(tmp_path / "a"), str(tmp_path / "b" / "run"), str(tmp_path / "a" / "run")])
    assert [run.name for run in found] == ["a/run", "b/run"]


def test_a_path_without_a_run_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    with pytest.raises(
        MissingFileError, match=re.escape(f"runz: there is no such folder. Did you mean '{tmp_path / 'runs'}'?")
    ):
        find_runs([str(tmp_path / "runz")])
    with pytest.raises(MissingFileError, match=r"no run.*metrics\.json.*output_dir"):
        find_runs([str(tmp_path / "runs")])


def test_a_folder_with_damaged_files_is_read_as_far_as_possible(tmp_path: Path) -> None:
    for name in ("run.json", "config.yaml", "losses.csv"):
        (tmp_path / name).write_bytes(b"\xff{[")
    (tmp_path / "metrics.json").write_text('{"iteration": 4, "a": 1.0}\n')
    (run,) = find_runs([str(tmp_path)])
    assert run.status == "unknown"
    assert run.settings == {}
    assert run.curves["a"].x.tolist() == [5]
    assert run.warnings == []
    assert run.checkpoints == []
