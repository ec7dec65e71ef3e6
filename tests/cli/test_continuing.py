"""How a run is continued from the command line: by its own program, with its own trainer and settings."""

import json
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

NET = """
import torch
from torch import nn

class Rows(torch.utils.data.Dataset):
    def __init__(self):
        self.inputs = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    def __len__(self):
        return len(self.inputs)
    def __getitem__(self, index):
        return {"inputs": self.inputs[index], "labels": (self.inputs[index].sum() > 0).long()}

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 2)
    def forward(self, inputs, labels=None):
        scores = self.layer(inputs)
        return {"loss": nn.functional.cross_entropy(scores, labels), "prediction_scores": scores}
"""
CONFIG = """
from net import Net, Rows
from trainwright import LazyCall, get_config
from trainwright.data import build_image_test_loader, build_image_train_loader

model = LazyCall(Net)()
dataloader = dict(
    train=LazyCall(build_image_train_loader)(dataset=LazyCall(Rows)(), num_workers=0),
    test=[LazyCall(build_image_test_loader)(dataset=LazyCall(Rows)(), num_workers=0)],
)
optim = get_config("common/optim.py").optim
train = get_config("common/train.py").train
train.update(output_dir="output", train_iter=8, log_period=4, train_micro_batch_size=4)
train.evaluation.evaluator.topk = (1,)
"""
PROGRAM = """
import sys
from torch.nn import functional as F
from trainwright import DefaultTrainer
from trainwright.cli.train import main

class Smoothed(DefaultTrainer):
    def train_step(self, model, inputs):
        loss = F.cross_entropy(model.layer(inputs["inputs"]), inputs["labels"], label_smoothing=0.9)
        self.backward(loss)
        self.step()
        return {"smoothed_loss": loss.detach()}

if __name__ == "__main__":
    sys.exit(main(trainer_class=Smoothed))
"""


def next_lines(text: str) -> list[str]:
    """The commands that the end of a training names."""
    found = re.search(r"\n  Next +(.*(?:\n    +.*)*)", text)
    assert found is not None, text
    return [line.strip() for line in found[1].splitlines()]


def git(folder: Path, *arguments: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    command = ["git", "-C", str(folder), *who, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def write_project(folder: Path) -> None:
    for name, content in {"net.py": NET, "config.py": CONFIG, "train_net.py": PROGRAM}.items():
        (folder / name).write_text(content)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, run_python: Callable[..., Any]) -> tuple[Path, str]:
    """A project whose program has trained a class of its own, and what that wrote."""
    folder = tmp_path_factory.mktemp("own_trainer")
    write_project(folder)
    done = run_python("train_net.py", "config.py", "train.train_iter=8", cwd=folder)
    return folder, done.stdout + done.stderr


def test_next_starts_the_program_of_a_trainer_class_of_the_users(
    project: tuple[Path, str], run_python: Callable[..., Any]
) -> None:
    folder, said = project
    _, evaluation, longer = next_lines(said)
    assert shlex.split(longer)[1:] == ["train_net.py", "config.py", "--resume", "train.train_iter=16"]
    run_python(*shlex.split(longer)[1:], cwd=folder)
    start = json.loads((folder / "output" / "run.json").read_text())["starts"][-1]
    assert (start["trainer"], start["iterations_done"]) == ("Smoothed", 16)
    done = run_python(*shlex.split(evaluation)[1:], cwd=folder)
    assert "Acc@1" in done.stdout + done.stderr


def test_commands_that_build_another_trainer_say_so(
    project: tuple[Path, str], run_python: Callable[..., Any], train: Callable[..., Any]
) -> None:
    folder, _ = project
    refused = train("output/config.yaml", "--resume", "train.train_iter=32", cwd=folder, code=2).stderr
    for fact in ("Smoothed", "DefaultTrainer", "train_net.py config.py", "train.allow_other_trainer=True"):
        assert fact in refused
    for command in (["check", "config.py", "--only", "optimizer"], ["estimate", "config.py"], ["eval", "output"]):
        said = run_python("-m", "trainwright", *command, cwd=folder, code=None).stderr
        assert "Smoothed" in said, command
        assert "builds a DefaultTrainer" in said, command


@pytest.mark.parametrize("command", [["train"], ["launch", "-n", "1", "train"]], ids=" ".join)
def test_a_command_records_the_repository_of_the_user(
    command: list[str], run_python: Callable[..., Any], tmp_path: Path
) -> None:
    write_project(tmp_path)
    git(tmp_path, "init", "-b", "work")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "first")
    run_python("-m", "trainwright", *command, "config.py", cwd=tmp_path)
    (start,) = json.loads((tmp_path / "output" / "run.json").read_text())["starts"]
    assert start["git"]["commit"] == git(tmp_path, "rev-parse", "HEAD")


def test_a_saved_configuration_continues_its_run_without_a_word(tmp_path: Path, train: Callable[..., Any]) -> None:
    write_project(tmp_path)
    done = train("config.py", cwd=tmp_path)
    *_, longer = next_lines(done.stdout + done.stderr)
    assert longer == "trainwright train output/config.yaml --resume train.train_iter=16"
    again = train(*shlex.split(longer)[2:], cwd=tmp_path)
    assert "WARNING" not in again.stdout + again.stderr
