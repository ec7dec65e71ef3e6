"""Runs of both APIs, made once, that tests of reports read."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.toys import Classifier, Samples, file_config
from trainwright import DefaultTrainer, Trainer, TrainingConfig

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--window-size=1200,900"),
)


def data(seed: int, length: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(length, 6, generator=generator)
    return TensorDataset(inputs, inputs[:, :3].argmax(1))


def train_by_objects(
    folder: Path, *, seed: int = 0, learning_rate: float = 0.1, num_epochs: int = 4, **more
) -> Trainer:
    torch.manual_seed(seed)
    config = TrainingConfig(
        output_dir=str(folder), num_epochs=num_epochs, batch_size=8, learning_rate=learning_rate, seed=seed,
        **{"metrics": ["accuracy"], "tensorboard": None, "progress_bar": False, "log_steps": 2, **more},
    )  # fmt: skip
    net = nn.Linear(6, 3)
    trainer = Trainer(net, config, data(1, 64), data(2, 24))
    trainer.train()
    return trainer


def train_by_files(folder: Path, **train: object) -> None:
    named = [Samples(inputs=part.tensors[0], labels=part.tensors[1]) for part in (data(1, 64), data(2, 24))]
    settings = {"train_iter": 24, "log_period": 4, "train_micro_batch_size": 8, "test_micro_batch_size": 8, **train}
    cfg = file_config(folder, lambda: Classifier((6, 3)), lambda: named[0], lambda: named[1], **settings)
    cfg.train.checkpointer.period = 8
    cfg.train.evaluation.eval_period = 8
    cfg.train.evaluation.evaluator.topk = (1,)
    DefaultTrainer(cfg).train()


@pytest.fixture(scope="session")
def runs_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the runs ``objects`` and ``files``: read only."""
    folder = tmp_path_factory.mktemp("runs")
    program = tmp_path_factory.mktemp("repository") / "train.py"
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    for arguments in (("init",), (*who, "commit", "--allow-empty", "--message", "first")):
        subprocess.run(["git", "-C", str(program.parent), *arguments], check=True, capture_output=True)
    with pytest.MonkeyPatch.context() as patch:
        # The program's repository: what a run records of it is then the same wherever and after whatever tests run.
        patch.setattr(sys.modules["__main__"], "__file__", str(program), raising=False)
        train_by_objects(folder / "objects", logs_dir="logs")
        train_by_files(folder / "files")
    return folder


@pytest.fixture(scope="session")
def browse(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """``browse(url)``: the document as a real browser has drawn it."""
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed (apt-get install chromium)")

    def dump(url: str, *flags: str) -> str:
        profile = tmp_path_factory.mktemp("browser")
        command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", *flags, "--dump-dom", url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert "CONSOLE" not in done.stderr or "Uncaught" not in done.stderr, done.stderr
        return done.stdout

    return dump
