"""Training, saving and resuming on a system without fork, file locks, symbolic links, and most signals."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainwright import TrainingConfig
from trainwright.base.files import relative_path
from trainwright.config.spec import spec_of_training_config
from trainwright.engine.folder.run_folder import TrainerFolder

MISSING = """
import os, signal, sys, torch  # torch asks for the name of the system

def symlink(*_arguments, **_settings):
    raise OSError(1314, "A required privilege is not held by the client")

os.symlink = symlink
for name in "fork forkpty register_at_fork sched_getaffinity sysconf getuid killpg O_NONBLOCK statvfs".split():
    vars(os).pop(name, None)
for name in "SIGUSR1 SIGUSR2 SIGHUP SIGCHLD SIGQUIT SIGALRM SIGKILL".split():
    vars(signal).pop(name, None)
sys.modules |= dict.fromkeys(("fcntl", "resource", "termios", "pwd", "grp"))
"""
OBJECTS = """
from torch.utils.data import TensorDataset
from trainwright import Trainer, TrainingConfig

inputs = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))

def weights(folder, epochs, **settings):
    torch.manual_seed(0)
    config = TrainingConfig(
        output_dir=folder, num_epochs=epochs, batch_size=4, lr=0.1, lr_scheduler_type="constant", metrics=[],
        model_checkpoint={"every_n_epoch": 1}, **settings,
    )
    data = TensorDataset(inputs, (inputs.sum(1) > 0).long())
    trainer = Trainer(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout()), config, data, data)
    trainer.train()
    return [parameter.tolist() for parameter in trainer.model.parameters()]

whole = weights("whole", 2)
weights("cut", 1)
assert weights("cut", 2, resume_from_checkpoint=True) == whole
weights("cut", 1)
"""
FILES = """
from safetensors.torch import load_file
from trainwright.cli.main import main

for arguments in (["one", "train_epoch=2"], ["two", "train_epoch=1"], ["two", "train_epoch=2", "--resume"]):
    folder, *settings = arguments
    settings = [one if one.startswith("--") else f"train.{one}" for one in (f"output_dir={folder}", *settings)]
    constant = "train.scheduler.alpha=1.0", "train.scheduler.warmup_factor=1.0"
    assert main(["train", CONFIG, *settings, *constant]) == 0
whole, cut = (load_file(f"{folder}/model_final/model.safetensors") for folder in ("one", "two"))
assert all(whole[name].equal(cut[name]) for name in whole)
assert main(["checkpoint", "verify", "two/model_final"]) == 0
"""


def test_training_saving_and_resuming_need_no_part_of_posix(
    mnist_project: Path, run_python: Callable[..., Any], tmp_path: Path
) -> None:
    config = str(mnist_project / "configs/config.py")
    run_python("-c", MISSING + OBJECTS + FILES.replace("CONFIG", repr(config)), cwd=tmp_path, fresh=True)
    assert not any(path.is_symlink() for path in tmp_path.rglob("*"))
    assert not [*tmp_path.rglob(".tmp-*")]


def test_a_path_on_another_drive_is_outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def relpath(*_arguments: object) -> str:
        raise ValueError("path is on mount 'D:', start on mount 'C:'")

    monkeypatch.setattr(os.path, "relpath", relpath)
    assert relative_path("/elsewhere/a", "/here") == "/elsewhere/a"
    config = TrainingConfig(output_dir=tmp_path, tensorboard={"log_dir": "/elsewhere/events"})
    folder = TrainerFolder(tmp_path, lambda: spec_of_training_config(config))
    assert folder.file_names.event_folders == ()
    assert not folder.contains("/elsewhere/events")
