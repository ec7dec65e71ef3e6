"""``trainwright check``, ``find`` and ``estimate``: what they print, and their exit codes."""

import json
from pathlib import Path
from typing import Any

import pytest

from trainwright.cli.main import main

CONFIG = """
import torch
from torch.utils.data import TensorDataset
from trainwright import LazyCall, get_config
from trainwright.data import ColumnDataset, build_image_train_loader
import torch.nn.functional as F

class Net(torch.nn.Linear):
    def forward(self, inputs, labels):
        return {"loss": F.cross_entropy(super().forward(inputs), labels)}

def data():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(128, 8, generator=generator)
    return ColumnDataset(inputs=inputs, labels=(inputs[:, 0] > 0).long())

model = LazyCall(Net)(in_features=8, out_features=2)
dataloader = dict(train=LazyCall(build_image_train_loader)(dataset=LazyCall(data)(), num_workers=0))
optim = get_config("common/optim.py").optim
train = get_config("common/train.py").train
train.update(output_dir="output/run", train_epoch=5, train_micro_batch_size=8)
train.evaluation.enabled = False
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: Any) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.py").write_text(CONFIG, encoding="utf-8")
    return "config.py"


def test_the_table_and_the_exit_code(config: str, capsys: Any, tmp_path: Path) -> None:
    names = "steps,learning_rate,parameters,samples"
    assert main(["check", config, "--only", names]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:5]] == names.split(",")
    assert lines[-1].startswith("0 problems, 4 passed")
    assert not (tmp_path / "output").exists()


def test_a_problem_exits_1_and_json_has_it(config: str, capsys: Any) -> None:
    assert main(["check", config, "--json", "--only", "learning_rate", "optim.lr=0.0"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["findings"][0]["result"] == "problem"
    assert not found["passed"]


def test_undecided_exits_3(config: str, capsys: Any) -> None:
    Path(config).write_text(CONFIG.replace("(inputs), labels", "(0 * inputs), labels"), encoding="utf-8")
    assert main(["check", config, "--only", "parameters"]) == 3  # a gradient of 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("too weak: parameters.")


def test_a_learning_rate_with_the_command_to_type(config: str, capsys: Any, tmp_path: Path) -> None:
    assert main(["find", "lr", config, "--updates", "60", "--plot", "curve.png"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["rate", "loss", "smoothed"]
    assert lines[-1].startswith("  trainwright train config.py optim.lr=")
    assert (tmp_path / "curve.png").stat().st_size > 1000
    assert not (tmp_path / "output").exists()


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_batch_size_within_a_memory(config: str, capsys: Any) -> None:
    assert main(["find", "batch-size", config, "--memory", "4KiB", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["limited_by"] == "memory"
    assert 1 < found["largest"] < 128
    assert main(["find", "batch-size", config, "--max-size", "16"]) == 0
    assert "train.train_micro_batch_size=16" in capsys.readouterr().out.splitlines()[-1]
    assert main(["find", "batch-size", config, "--memory", "1B"]) == 1
    assert "Not even one sample fits" in capsys.readouterr().out


@pytest.fixture
def estimate(run_python: Any, mnist_project: Path, tmp_path: Path) -> Any:
    config = mnist_project / "configs" / "config.py"
    return lambda *arguments, code=0: run_python(
        "-m", "trainwright.cli.main", "estimate", config, *arguments, cwd=tmp_path, code=code
    )


def test_memory_and_traffic_of_64_processes(estimate: Any, tmp_path: Path) -> None:
    found = json.loads(estimate("--world", 64, "--json", "train.train_micro_batch_size=8").stdout)
    assert found["layout"]["data"] == 64
    (cost,) = found["ranks"]
    assert cost["rank"] == 0
    assert cost["peak"] == sum(cost[name] for name in ("parameters", "gradients", "optimizer", "activations"))
    assert cost["traffic"]["all-reduce"] == cost["trainable"] == 4 * 669_706
    assert [*tmp_path.iterdir()] == []
    lines = estimate("--world", 4).stdout.splitlines()
    assert lines[0] == "4 processes: 4 data"
    assert "all-reduce" in lines[-1]


@pytest.mark.exhaustive
def test_layouts_that_fit(estimate: Any) -> None:
    lines = estimate("--memory", "80GiB").stdout.splitlines()
    assert lines[0] == "1 process with 80.0 GiB each, best layout first"
    assert lines[2].endswith("fits")
    assert "parameters and states alone" in estimate("--memory", "1MiB", code=1).stdout
