"""``trainwright check CONFIG``: a table or JSON, and the exit code."""

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


@pytest.mark.parametrize(
    ("arguments", "fact"),
    [
        (["--only", "label"], "Did you mean 'labels'?"),
        (["train.sed=1"], "Did you mean 'seed'?"),
    ],
)
def test_a_wrong_argument_exits_2(config: str, arguments: list[str], fact: str, capsys: Any) -> None:
    assert main(["check", config, *arguments]) == 2
    assert fact in capsys.readouterr().err
