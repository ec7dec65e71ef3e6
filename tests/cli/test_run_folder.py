"""What the files of a run say, also when they are damaged."""

import ast
import json
import re
from pathlib import Path

import pytest

from tests.cli.conftest import FinishedRun
from trainwright.base.errors import ConfigError, MissingFileError
from trainwright.cli.predict import model_folder
from trainwright.cli.project_files import project_files
from trainwright.cli.run_checkpoint import find_checkpoint, find_target, load_trainer
from trainwright.cli.run_folder import read_run, run_folders, settings_of


def run(folder: Path, log: str = "", rows: str = "", **ended: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text("train: {seed: 3, list: [a, b]}\n")
    (folder / "log.txt").write_text(log)
    (folder / "metrics.json").write_text(rows)
    start = {"started": "2026-01-02T03:04:05+00:00", "git": None, "last_iteration": 100, **ended}
    (folder / "run.json").write_text(json.dumps({"starts": [start]}))
    return folder


def test_a_record_of_the_run_counts_first(tmp_path: Path) -> None:
    start = {"started": "2026-01-02T03:04:05+00:00", "status": "finished", "iterations_done": 7, "last_iteration": 14}
    start |= {"seconds": 2.5, "ended": "2026-01-02T03:04:08+00:00", "git": {"commit": "0123456789abcdef"}}
    best = {"metric": "Acc@1", "value": 90.0, "iteration": 5, "is_higher_better": True}
    (run(tmp_path) / "run.json").write_text(json.dumps({"starts": [{**start, "best": None}, {**start, "best": best}]}))
    found = read_run(tmp_path, tmp_path)
    assert (found.state, found.progress, found.seconds, found.commit) == ("finished", 0.5, 5.0, "0123456789abcdef")
    assert (found.metric, found.best, found.is_higher_better) == ("Acc@1", 90.0, True)


def test_damaged_files_are_no_error(tmp_path: Path) -> None:
    folder = run(tmp_path, log="\x00\xff", rows="[1]\nnull\n{}")
    (folder / "run.json").write_text("[")
    found = read_run(folder, tmp_path)
    assert (found.state, found.iteration, found.best, found.loss) == ("interrupted", None, None, None)
    assert read_run(run(tmp_path), tmp_path).state == "interrupted"  # a start without an end
    assert read_run(run(tmp_path, status="failed"), tmp_path).state == "failed"


def test_settings_and_folders(tmp_path: Path) -> None:
    folder = run(tmp_path / "a" / "b")
    run(tmp_path / "a" / ".hidden")
    run(folder / "earlier_runs" / "001")
    assert list(run_folders(tmp_path)) == [folder]
    assert list(run_folders(tmp_path, earlier=True)) == [folder, folder / "earlier_runs" / "001"]
    assert settings_of(str(folder)) == {"train.seed": 3, "train.list": ["a", "b"]}


def test_a_run_its_config_and_its_checkpoint_are_one_target(finished: FinishedRun) -> None:
    folder = finished.folder
    assert find_target(str(folder)) == find_target(str(folder / "config.yaml"))
    best = find_target(str(folder / "model_best"))
    assert (best.config, best.run, best.checkpoint) == (folder / "config.yaml", folder, folder / "model_best")
    assert find_target(str(finished.config)).run is None
    with pytest.raises(MissingFileError, match=re.escape(f"Did you mean '{folder}'")):
        find_target(str(folder.with_name("outpt")))


def test_a_run_without_a_best_checkpoint_uses_the_last(finished: FinishedRun, tmp_path: Path) -> None:
    (tmp_path / "model_final").symlink_to((finished.folder / "model_final").resolve())
    (tmp_path / "last_checkpoint").write_text("model_final")
    assert find_checkpoint(tmp_path, None).name == "model_final"
    with pytest.raises(MissingFileError, match="no complete checkpoint"):
        find_checkpoint(finished.config.parent, None)


def test_a_prediction_takes_no_config_file(finished: FinishedRun) -> None:
    with pytest.raises(ConfigError, match=rf"{re.escape(str(finished.config))}: is a file; pass the folder of a run"):
        model_folder(finished.config, None)


def test_a_function_that_returns_no_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_own_script.py").write_text("def build():\n    return 3\n")
    with pytest.raises(ConfigError, match="returned a int"):
        load_trainer(f"{tmp_path}/my_own_script.py:build")
    with pytest.raises(MissingFileError, match="no such Python file"):
        load_trainer("nowhere.py")


@pytest.mark.parametrize("api", ["config", "python"])
def test_the_files_are_programs_without_placeholders(api: str) -> None:
    files = project_files("my-project", "my_project", api)
    for name, text in files.items():
        if name.endswith(".py"):
            ast.parse(text, name)
        for placeholder in ("PROJECT", "PACKAGE", "DATASET", "ARGUMENTS", "CLASS_IMPORT", "COMMANDS", "RUN_FILE"):
            assert placeholder not in text
        assert max(map(len, text.splitlines()), default=0) <= 120
