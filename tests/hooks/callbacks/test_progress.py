"""Where there is no terminal, lines tell how far an epoch is."""

import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from trainwright import Trainer, TrainingConfig
from trainwright.hooks import HookBase

DATA = TensorDataset(torch.randn(400, 4), torch.randint(2, (400,)))


class Slow(HookBase):
    """Each step takes a second of a clock that is not real."""

    now = 0.0

    def after_step(self) -> None:
        Slow.now += 1.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    Slow.now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: Slow.now)


def lines(folder: Path, caplog: pytest.LogCaptureFixture, **settings: Any) -> list[str]:
    settings = {"log_steps": None, **settings}
    config = TrainingConfig(
        output_dir=folder, num_epochs=2, batch_size=4, metrics=None, early_stopping=None, **settings
    )
    trainer = Trainer(nn.Linear(4, 2), config, DATA)
    trainer._hooks.insert(0, Slow())
    with caplog.at_level(logging.INFO):
        trainer.train()
    return [r.getMessage() for r in caplog.records if r.getMessage().startswith("[epoch")]


@pytest.mark.usefixtures("clock")
def test_a_line_every_half_minute(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = lines(tmp_path, caplog)
    assert 5 <= len(found) <= 7  # 200 seconds
    assert found[0].startswith("[epoch 1/2] step 31/100 (31 %), loss=")
    assert found[0].endswith("0:01:09 left in the epoch.")
    assert any("[epoch 2/2]" in line for line in found)
    assert "\r" not in "".join(found)


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("settings", [{"log_steps": 10}, {"print_steps": 50}, {"progress_bar": False}], ids=str)
def test_not_where_lines_are_asked_for_by_steps(
    settings: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert lines(tmp_path, caplog, **settings) == []


def test_short_epochs_have_their_own_line_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = Trainer(
        nn.Linear(4, 2),
        TrainingConfig(output_dir=tmp_path, num_epochs=2, metrics=None, early_stopping=None, log_steps=None),
        DATA,
    )
    with caplog.at_level(logging.INFO):
        trainer.train()
    found = [r.getMessage() for r in caplog.records if "iteration: " in r.getMessage()]
    assert [line.partition("iteration: ")[2].split()[0] for line in found] == ["50/100", "100/100"]
