"""``trainwright find lr`` and ``find batch-size``: what they print, and their exit codes."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_check import config as config  # the fixture
from trainwright.cli.main import main


def test_a_learning_rate_with_the_command_to_type(config: str, capsys: Any, tmp_path: Path) -> None:
    assert main(["find", "lr", config, "--updates", "60", "--plot", "curve.png"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["rate", "loss", "smoothed"]
    assert lines[-1].startswith("  trainwright train config.py optim.lr=")
    assert (tmp_path / "curve.png").stat().st_size > 1000
    assert not (tmp_path / "output").exists()


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


@pytest.mark.parametrize(
    ("arguments", "fact"),
    [
        (["find"], "trainwright find: got ''"),
        (["find", "batchsize", "CONFIG"], "Did you mean 'batch-size'?"),
        (["find", "batch-size", "CONFIG"], "Give --memory 24GiB"),
        (["find", "lr", "CONFIG", "--lowest", "1", "--highest", "0.1"], "lowest < highest"),
    ],
)
def test_a_wrong_argument_exits_2(config: str, arguments: list[str], fact: str, capsys: Any) -> None:
    assert main([config if one == "CONFIG" else one for one in arguments]) == 2
    assert fact in capsys.readouterr().err
