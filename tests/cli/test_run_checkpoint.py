"""The run and the checkpoint that an argument names."""

import re
from pathlib import Path

import pytest

from tests.cli.conftest import FinishedRun
from trainwright.cli.run_checkpoint import find_checkpoint, find_target, load_trainer
from trainwright.config.errors import ConfigError, ConfigKeyError, MissingFileError


def test_a_run_its_config_and_its_checkpoint_are_one_target(finished: FinishedRun) -> None:
    folder = finished.folder
    assert find_target(str(folder)) == find_target(str(folder / "config.yaml"))
    best = find_target(str(folder / "model_best"))
    assert (best.config, best.run, best.checkpoint) == (folder / "config.yaml", folder, folder / "model_best")
    assert find_target(str(finished.config)).run is None
    with pytest.raises(MissingFileError, match=re.escape(f"Did you mean '{folder}'")):
        find_target(str(folder.with_name("outpt")))


def test_a_checkpoint_by_name_and_by_path(finished: FinishedRun) -> None:
    folder = finished.folder
    assert find_checkpoint(folder, None) == folder / "model_best"
    assert find_checkpoint(folder, "model_final") == folder / "model_final"
    assert find_checkpoint(folder, str(folder / "model_final")) == folder / "model_final"
    with pytest.raises(ConfigKeyError, match="Did you mean 'model_final'"):
        find_checkpoint(folder, "model_fnal")


def test_a_run_without_a_best_checkpoint_uses_the_last(finished: FinishedRun, tmp_path: Path) -> None:
    (tmp_path / "model_final").symlink_to((finished.folder / "model_final").resolve())
    (tmp_path / "last_checkpoint").write_text("model_final")
    assert find_checkpoint(tmp_path, None).name == "model_final"
    with pytest.raises(MissingFileError, match="no complete checkpoint"):
        find_checkpoint(finished.config.parent, None)


def test_a_function_that_returns_no_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_own_script.py").write_text("def build():\n    return 3\n")
    with pytest.raises(ConfigError, match="returned a int"):
        load_trainer(f"{tmp_path}/my_own_script.py:build")
    with pytest.raises(MissingFileError, match="no such Python file"):
        load_trainer("nowhere.py")
