"""A run: its settings, its record, and copies of it that change nothing, in both APIs."""

import json
import logging
import os
import platform
import subprocess
import threading
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.inspect.check.seeded_bugs import config_files
from tests.toys import Classifier, file_config, points, quiet
from trainwright import DefaultTrainer, Trainer, TrainingConfig
from trainwright.checkpoint import CheckpointError
from trainwright.config import ConfigError
from trainwright.engine.folder import record as run_record
from trainwright.engine.folder.record import git_state, machine, numerics, versions, working_folder
from trainwright.events.formats import read_starts
from trainwright.hooks import CallbackHook
from trainwright.inspect.report import picture


def python(folder: Path) -> Any:
    config = TrainingConfig(
        output_dir=str(folder), num_epochs=1, batch_size=4, gradient_accumulation_steps=2, seed=7, early_stopping=None
    )
    return Trainer(Classifier(seed=0), config, points())


def by_config(folder: Path) -> Any:
    sizes = {"train_micro_batch_size": 4, "num_accumulation_steps": 2}
    return DefaultTrainer(file_config(folder, lambda: Classifier(seed=0), points, seed=7, train_iter=2, **sizes))


@pytest.mark.parametrize("make", [python, by_config])
def test_the_settings_have_one_vocabulary(make: Any, tmp_path: Path) -> None:
    spec = make(tmp_path).run.spec
    assert (spec.batch_size, spec.gradient_accumulation_steps, spec.seed) == (4, 2, 7)
    assert spec.mixed_precision is None
    assert Path(spec.output_dir) == tmp_path


@pytest.mark.parametrize("make", [python, by_config])
def test_a_trained_copy_changes_nothing_of_the_run(make: Any, tmp_path: Path) -> None:
    trainer = make(tmp_path / "run")
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    new = trainer.run.copy(tmp_path / "copy", batch_size=2)
    batch = new.run.prepare(new.run.batches.first(1)[0])
    assert len(batch["labels"]) == 2
    assert torch.equal(new.run.loss(batch), trainer.run.loss(batch))
    new.train()
    assert any(not torch.equal(value, before[name]) for name, value in new.model.state_dict().items())
    assert all(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())
    assert trainer.run.spec.batch_size == 4


def test_parts_of_the_trainer_are_those_of_its_run(tmp_path: Path) -> None:
    trainer = python(tmp_path)
    trainer.lr_scheduler = other = torch.optim.lr_scheduler.ConstantLR(trainer.optimizer)
    assert trainer.run.lr_scheduler is other
    assert trainer.run.model is trainer.model
    assert trainer.optimizers == {"optimizer": trainer.optimizer}


def test_a_replaced_inner_trainer_is_refused(tmp_path: Path) -> None:
    trainer: Any = config_files(tmp_path / "run")
    trainer._trainer = object()
    with pytest.raises(ConfigError, match=r"trainer\._trainer was replaced"):
        trainer.check()


DATA = TensorDataset(torch.randn(16, 4, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 2)


def trainer(folder: Path, data: Any = DATA, **settings: Any) -> Trainer:
    settings = {"num_epochs": 1, "lr_scheduler_type": "linear", **settings}
    return Trainer(nn.Linear(4, 2), quiet(folder, batch_size=4, seed=0, **settings), data, DATA)


def test_a_resumed_run_adds_a_start(tmp_path: Path) -> None:
    trainer(tmp_path).train()
    trainer(tmp_path, num_epochs=2, resume_from_checkpoint=True).train()
    first, second = read_starts(tmp_path / "run.json")
    assert (first["first_iteration"], first["last_iteration"], first["iterations_done"]) == (1, 4, 4)
    assert (second["first_iteration"], second["last_iteration"], second["iterations_done"]) == (5, 8, 8)
    for start in (first, second):
        assert start["status"] == "finished"
        assert start["trainer"] == "Trainer"
        assert start["samples_per_iteration"] == 4
        assert start["model"] == {"class": "Linear", "parameters": 10, "trainable": 10}
        assert start["data"]["train"] == first["data"]["eval"] == second["data"]["train"]
        assert start["data"]["train"]["samples"] == 16
        assert sum(start["phases"].values()) > 0
        assert start["peak_memory_bytes"] > 1e6
        assert start["best"]["metric"] == "eval_loss"


def test_a_resume_with_other_data_of_the_same_size_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer(tmp_path).train()
    for epochs, data in ((2, DATA), (3, TensorDataset(torch.randn(16, 4), torch.randint(2, (16,))))):
        trainer(tmp_path, data, num_epochs=epochs, resume_from_checkpoint=True).train()
        warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert [("'train'" in text, "seed" in text) for text in warnings] == ([] if data is DATA else [(True, True)])


def test_a_new_run_in_the_folder_has_its_own_record(tmp_path: Path) -> None:
    for _ in range(2):
        trainer(tmp_path).train()
    assert len(read_starts(tmp_path / "run.json")) == 1
    assert len(read_starts(tmp_path / "earlier_runs" / "001" / "run.json")) == 1


@pytest.mark.parametrize("moment", ["after_step", "after_train"])
@pytest.mark.parametrize(("error", "status"), [(RuntimeError, "failed"), (KeyboardInterrupt, "interrupted")])
def test_how_a_run_ends_and_a_running_one_has_no_end(
    moment: str, error: type[BaseException], status: str, tmp_path: Path
) -> None:
    def fail(one: Trainer) -> None:
        seen.extend(read_starts(tmp_path / "run.json"))
        raise error("on purpose")

    seen: list[dict[str, Any]] = []
    one = trainer(tmp_path)
    one.register_hooks([CallbackHook(**{moment: fail})])
    with pytest.raises(error, match="on purpose"):
        one.train()
    assert "status" not in seen[0]
    assert read_starts(tmp_path / "run.json")[0]["status"] == status


@pytest.mark.parametrize("asynchronous", [True, False])
def test_the_training_thread_waits_for_no_disk_at_a_best_result(
    asynchronous: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, sync = list[str](), os.fsync

    def watched(descriptor: int) -> None:
        if threading.current_thread() is threading.main_thread():
            synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        sync(descriptor)

    one = trainer(tmp_path, num_epochs=3, learning_rate=0.1, save_asynchronously=asynchronous)
    seen: list[dict[str, Any]] = []
    one.register_hooks(
        [
            CallbackHook(
                before_step=lambda _: monkeypatch.setattr(os, "fsync", watched),
                after_train=lambda trainer: (monkeypatch.undo(), seen.extend(read_starts(tmp_path / "run.json"))),
            )
        ]
    )
    one.train()
    during = [name for name in synced if "run.json" in name]
    assert bool(during) is not asynchronous
    assert seen[0]["best"]["iteration"] > 4  # a best result after the first was recorded before the end


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_failed_run_names_the_best_result_that_has_a_checkpoint(asynchronous: bool, tmp_path: Path) -> None:
    def occupy(one: Trainer) -> None:
        best = tmp_path / "checkpoints" / "model_best"
        if one.iter == 8 and best.is_symlink():  # after the first epoch
            best.unlink()
            best.mkdir()
            (best / "mine").touch()

    one = trainer(tmp_path, num_epochs=6, learning_rate=0.1, save_asynchronously=asynchronous)
    one.register_hooks([CallbackHook(before_step=occupy)])
    with pytest.raises(CheckpointError, match="exists and is not a checkpoint"):
        one.train()
    (start,) = read_starts(tmp_path / "run.json")
    assert start["status"] == "failed"
    assert start["best"]["iteration"] <= 8


def test_a_run_that_fails_behind_its_last_save_names_the_best_result_of_its_end(tmp_path: Path) -> None:
    def fail(_: Any) -> None:
        raise OSError("on purpose")

    one = trainer(tmp_path, learning_rate=0.1)
    one.register_hooks([CallbackHook(after_train=fail)])
    with pytest.raises(OSError, match="on purpose"):
        one.train()
    (start,) = read_starts(tmp_path / "run.json")
    assert (start["status"], start["best"]["iteration"]) == ("failed", 4)


def test_secrets_of_the_command_are_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["train.py", "api_key=sk-0123456789abcdef0123456789"])
    trainer(tmp_path).train()
    text = (tmp_path / "run.json").read_text()
    assert "0123456789abcdef" not in text
    assert json.loads(text)["starts"][0]["command"].endswith("train.py 'api_key=***'") or "api_key" in text


def test_a_folder_at_its_place_stops_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "run.json").mkdir()
    with caplog.at_level(logging.WARNING):
        trainer(tmp_path).train()
    assert (tmp_path / "run.json").is_dir()


@pytest.fixture
def pictured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a training of less than some seconds gets a picture of its curves."""
    monkeypatch.setattr(run_record, "MIN_SECONDS", 0.0)


@pytest.mark.usefixtures("pictured")
def test_a_picture_of_the_curves_is_in_the_folder_and_in_the_card(tmp_path: Path) -> None:
    trainer(tmp_path).train()
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "![Curves of the training](curves.png)" in (tmp_path / "README.md").read_text()
    trainer(tmp_path).train()  # the earlier run keeps its own
    assert (tmp_path / "earlier_runs" / "001" / "curves.png").exists()
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "curves.png").write_bytes(b"my picture")
    trainer(tmp_path / "own").train()
    assert (tmp_path / "own" / "curves.png").read_bytes() == b"my picture"


def test_a_short_training_has_no_picture(tmp_path: Path) -> None:
    trainer(tmp_path).train()
    assert not (tmp_path / "curves.png").exists()
    assert "curves.png" not in (tmp_path / "README.md").read_text()


@pytest.mark.usefixtures("pictured")
@pytest.mark.parametrize("error", [ImportError("matplotlib"), ValueError("on purpose")])
def test_a_picture_that_cannot_be_drawn_fails_no_run(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(folder: Path) -> None:
        raise error

    monkeypatch.setattr(picture, "draw_curves", fail)
    trainer(tmp_path).train()
    assert ("on purpose" in caplog.text) == isinstance(error, ValueError)


def git(folder: Path, *arguments: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    return subprocess.run(
        ["git", "-C", str(folder), *who, *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


def test_the_state_of_a_repository(tmp_path: Path) -> None:
    git(tmp_path, "init", "-b", "work")
    (tmp_path / "a file.py").write_text("a = 1\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "first")
    (tmp_path / "inside").mkdir()
    clean = git_state(str(tmp_path / "inside"))
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert clean == {"commit": commit, "branch": "work", "changed": [], "num_changed": 0, "diff": None}
    (tmp_path / "a file.py").write_text("a = 2\n")
    git_state.cache_clear()
    changed = git_state(str(tmp_path))
    assert changed is not None
    assert (changed["changed"], changed["num_changed"]) == (["a file.py"], 1)
    assert len(changed["diff"]) == 16


def test_no_repository_no_git_and_a_deleted_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert git_state(str(tmp_path / "nowhere")) is None
    assert git_state("") is None
    (tmp_path / ".git").mkdir()
    assert git_state(str(tmp_path)) is None  # not a repository
    git_state.cache_clear()
    monkeypatch.setenv("PATH", "")
    assert git_state(str(tmp_path)) is None
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert working_folder() == ""


def test_versions_and_machine() -> None:
    assert versions()["torch"] == metadata.version("torch")
    assert versions()["python"] == platform.python_version()
    found = machine()
    assert found["cpus"] >= 1
    assert found["memory_bytes"] is None or found["memory_bytes"] > 1e8
    assert found["host"] == platform.node()
    assert numerics()["threads"] == torch.get_num_threads()
    assert os.sep not in found["processor"][:1]
