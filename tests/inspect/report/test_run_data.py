"""What a report reads from a run's folder, also from damaged files, and the state of runs that have no end."""

import fcntl
import json
import math
import os
import re
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from trainwright.base.errors import MissingFileError
from trainwright.cli.main import main
from trainwright.events.formats import read_starts
from trainwright.inspect.report.run_data import RunData, find_runs, read_loss_table, read_metrics
from trainwright.inspect.report.run_state import state_of


def test_a_run_of_each_api_is_read(runs_folder: Path) -> None:
    files, objects = find_runs([str(runs_folder)])
    assert [files.name, objects.name] == ["files", "objects"]
    assert [files.latest["api"], objects.latest["api"]] == ["config file", "Python"]
    assert files.status == objects.status == "finished"
    assert len(files.curves["total_loss"].x) == 24
    assert list(objects.curves["total_loss"].x) == list(range(1, 33))
    assert list(files.curves["Acc@1"].x) == [8, 16, 24]
    assert objects.curves["eval_loss"].x[-1] == 32
    assert files.settings["train.train_iter"] == 24
    assert objects.settings["learning_rate"] == 0.1
    assert {entry.path.name for entry in files.checkpoints} >= {"model_0000007", "model_best", "model_final"}
    assert all(entry.is_complete for entry in [*files.checkpoints, *objects.checkpoints])
    assert objects.checkpoints
    assert files.evaluated >= {"Acc@1"}
    assert objects.evaluated == {"eval_loss", "eval_accuracy"}


def test_a_metric_of_the_training_has_the_values_of_complete_epochs(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"starts": [{"iterations_per_epoch": 4.0}]}')
    rows = [{"iteration": n, "total_loss": 1.0, "accuracy": n, "eval_accuracy": n} for n in (1, 3, 5, 7, 8)]
    (tmp_path / "metrics.json").write_text("\n".join(map(json.dumps, rows)) + "\n")
    (run,) = find_runs([str(tmp_path)])
    assert list(run.curves["accuracy"].x) == [4, 8, 9]
    assert len(run.curves["eval_accuracy"].x) == len(run.curves["total_loss"].x) == 5


@pytest.mark.parametrize(("last", "over"), [(2, "epoch"), (3, "updates"), (4, "epoch")])
def test_the_last_row_of_an_epoch_that_ends_within_an_iteration_is_its_mean(
    tmp_path: Path, last: int, over: str
) -> None:
    (tmp_path / "run.json").write_text('{"starts": [{"iterations_per_epoch": 2.5}]}')
    (tmp_path / "metrics.json").write_text(json.dumps({"iteration": last, "total_loss": 1.0}) + "\n")
    (run,) = find_runs([str(tmp_path)])
    assert run.last_loss is not None
    assert run.last_loss[1].endswith(over)


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


WRONG = [
    {"started": 3}, {"started": "yesterday"}, {"seconds": "x"}, {"seconds": True}, {"best": 3}, {"git": "x"},
    {"best": {"metric": "Acc", "value": None, "iteration": 3}}, {"best": {"metric": 3, "value": "x", "iteration": "y"}},
    {"git": {"commit": 3, "num_changed": 3}}, {"git": {"commit": "a", "num_changed": 1, "changed": 3}}, {"data": "x"},
    {"data": {"train": 3}}, {"machine": "x"}, {"machine": {"accelerators": [3]}}, {"machine": {"memory_bytes": -1}},
    {"versions": ["x"]}, {"numerics": 3}, {"phases": "x"}, {"phases": {"data": "x"}}, {"phases": {"data": 1e999}},
    {"last_iteration": "x"}, {"last_iteration": 10**40}, {"samples_per_iteration": -1}, {"device": 3},
    {"model": {"class": None, "parameters": "x"}}, {"peak_memory_bytes": "x"}, {"evaluated": 3}, {"status": 3},
]  # fmt: skip


@pytest.fixture
def run(runs_folder: Path, tmp_path: Path) -> Path:
    return shutil.copytree(runs_folder / "files", tmp_path / "run", symlinks=True)


def test_a_start_that_was_changed_by_hand_ends_no_command(run: Path, runs_folder: Path, tmp_path: Path) -> None:
    record = json.loads((run / "run.json").read_text())
    start = record["starts"][-1]
    for values in WRONG:
        (run / "run.json").write_text(json.dumps({"starts": [{**start, **values}]}))
        assert read_starts(run / "run.json") == [], values
    assert main(["runs", str(run)]) == 0
    assert main(["report", str(run), str(runs_folder / "files"), "--output", str(tmp_path / "report.html")]) == 0
    (run / "run.json").write_text(json.dumps({"starts": [start, {}, {"phases": {"data": 1.0}, "seconds": 2}]}))
    assert len(read_starts(run / "run.json")) == 3
    assert main(["report", str(run), "--output", str(tmp_path / "report.html")]) == 0


@pytest.mark.parametrize(
    "text", ["", "[]", "null", '{"starts": {}}', '{"starts": [1, {}]}', "\0\0", '{"starts":' * 9999]
)
def test_a_damaged_record_has_no_starts(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text)
    assert read_starts(tmp_path / "run.json") in ([], [{}])


def test_a_killed_run_is_interrupted_and_shows_its_last_sign_of_life(run: Path) -> None:
    record = json.loads((run / "run.json").read_text())
    start = {name: value for name, value in record["starts"][-1].items() if name not in ("ended", "status", "seconds")}
    (run / "run.json").write_text(json.dumps({"starts": [start]}))
    log = (run / "log.txt").read_text()
    (run / "log.txt").write_text(log[: log.index("Finished after")])
    found = RunData(run, "run")
    assert found.status == "interrupted"
    assert found.last_sign == max((run / name).stat().st_mtime for name in ("log.txt", "metrics.json", "losses.csv"))
    descriptor = os.open(run, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)  # as a training process does
    assert (found.status, found.last_sign) == ("running", None)
    os.close(descriptor)
    assert found.status == "interrupted"


def test_a_run_of_another_machine_runs_while_it_writes(run: Path) -> None:
    (run / "log.txt").write_text("Training\n")
    start = {"started": "2026-01-02T03:04:05+00:00", "machine": {"host": "another"}}
    assert state_of(run, [start]) == "running"
    for name in ("log.txt", "metrics.json", "losses.csv"):
        os.utime(run / name, (0, time.time() - 3600))
    assert state_of(run, [start]) == "interrupted"


@pytest.mark.parametrize("line", ["x,y", "nan,1", "-5,1", "1e400,1", "7", "1,2,3", "\0\0\0\0", "é"])
def test_a_damaged_line_of_losses_does_not_move_the_others(tmp_path: Path, line: str) -> None:
    (tmp_path / "losses.csv").write_text(f"iteration,total_loss\n0,0.5\n{line}\n1,nan\n2,0.25\n", encoding="utf-8")
    table = read_loss_table(tmp_path / "losses.csv")
    assert table is not None
    assert table[:, 0].tolist() == [0, 1, 2]
    assert table[[0, 2], 1].tolist() == [0.5, 0.25]


def test_numbers_that_no_float_holds_are_not_finite(tmp_path: Path) -> None:
    rows = [
        f'{{"iteration": 3, "lr": {"1" * 400}}}',
        '{"iteration": 4, "lr": 0.5}',
        f'{{"iteration": {10**30}, "a": 1}}',
    ]
    (tmp_path / "metrics.json").write_text("\n".join(rows))
    found = read_metrics(tmp_path / "metrics.json")
    assert list(found) == ["lr"]
    assert (found["lr"].y.tolist(), found["lr"].num_bad) == ([0.5], 1)


def test_one_run_with_damaged_settings_does_not_hide_the_others(
    run: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(run, run.parent / "damaged")
    (run.parent / "damaged" / "config.yaml").write_text("a: [")
    assert main(["runs", str(run.parent), "--show", "train.train_iter"]) == 0
    shown = capsys.readouterr()
    assert "24" in shown.out
    assert "2 runs" in shown.out
    assert "damaged: its settings cannot be read" in caplog.text
