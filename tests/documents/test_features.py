"""The page of features: each line of code in it works."""

import re
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from tests.toys import Stream
from trainwright import Trainer, TrainingConfig
from trainwright.cli.main import main
from trainwright.data import TarShards
from trainwright.engine import TrainingLoop

PAGE = Path(__file__).parents[2] / "docs" / "features.md"
WITHOUT_CODE = {"automatic", "automatic from 4,194,304 samples on", "not yet"}
MARKS = {"yes", "partly", ""}


def rows() -> list[list[str]]:
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if not line.startswith("| feature")]


CODE = [code for row in rows() for code in re.findall(r"`([^`]+)`", row[1])]


def test_each_row_has_a_line_of_code_and_a_mark_for_each_trainer() -> None:
    assert len(rows()) > 40
    for name, ours, *others in rows():
        assert ours in WITHOUT_CODE or ours.startswith("`"), name
        assert len(others) == 2, name
        assert set(others) <= MARKS, name


class Pairs(Dataset[Any]):
    lengths = range(16)  # of texts, which batches of similar length need

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        return torch.full((4,), index / 16), index % 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.g, self.d = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = block(inputs).tanh()
        scores: Tensor = self.d(self.g(inputs))
        return scores


@pytest.mark.parametrize("code", [code for code in CODE if code.startswith("TrainingConfig(")])
@pytest.mark.exhaustive(every=4)
def test_settings_train(code: str, tmp_path: Path) -> None:
    settings = eval(code.replace("TrainingConfig(", "dict(", 1))
    config = TrainingConfig(**{"output_dir": tmp_path, "num_epochs": 2, "tensorboard": None} | settings)
    if config.graph:  # compiled by the tests of graph mode
        return
    trainer = Trainer(Net(), config, Pairs(), Pairs())
    trainer.train()
    assert trainer.state.global_step > 0


@pytest.mark.parametrize("code", [code for code in CODE if not code.startswith(("TrainingConfig(", "torchrun"))])
def test_expressions_work(code: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, data = Net(), Pairs()
    g, d = (torch.optim.SGD(getattr(model, name).parameters(), lr=0.1) for name in "gd")
    config = TrainingConfig(output_dir=tmp_path / "run", max_steps=4, tensorboard=None)
    trainer = Trainer(model, config, data)
    if code.startswith("trainwright "):
        trainer.train()
        assert main([*code.split()[1:], str(config.output_dir)]) == 0
        assert "complete" in capsys.readouterr().out
        return
    for number in range(10):
        with tarfile.open(tmp_path / f"shard-{number:03}.tar", "w") as tar:
            tar.addfile(tarfile.TarInfo("sample.txt"))
    names: dict[str, Any] = {"Trainer": Trainer, "TarShards": TarShards, "TrainingLoop": TrainingLoop}
    names |= {"model": model, "bert": model, "config": config, "trainer": trainer, "g": g, "d": d, "optimizer": g}
    names |= {
        "data": data,
        "stream": Stream(lambda: (Pairs()[index] for index in range(16))),
        "loader": DataLoader(data),
        "folder": tmp_path / "loop",
    }
    names["loss"] = model(torch.ones(2, 4)).sum()
    exec(code.replace("shard-{", f"{tmp_path}/shard-{{"), names)
