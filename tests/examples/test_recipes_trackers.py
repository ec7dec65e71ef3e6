"""The trackers of the recipe, each where its package is installed, and one of ten lines."""

import json
import logging
import runpy
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from trainwright import Trainer, TrainingConfig
from trainwright.events import EventWriter, Tracker

RECIPE = runpy.run_path(str(Path(__file__).parents[2] / "examples/recipes/trackers.py"))


@pytest.mark.filterwarnings("ignore")  # of these packages: deprecated names, open sockets
@pytest.mark.parametrize("name", RECIPE["OFFLINE"])
def test_a_resumed_run_continues_that_of_the_tracker(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, _ = RECIPE["OFFLINE"][name]
    package = pytest.importorskip(kind.name, reason=f"pip install {kind.name}")
    monkeypatch.chdir(tmp_path)
    for variable, value in (("CLEARML_OFFLINE_MODE", "1"), ("CLEARML_CACHE_DIR", str(tmp_path / "clearml"))):
        monkeypatch.setenv(variable, value)
    if name == "clearml":
        package.Task.set_offline(True)
    records = []
    for epochs in (1, 2):
        RECIPE["train"](name, tmp_path / "run", epochs, resume=epochs > 1)
        records.append(json.loads((tmp_path / "run/trackers.json").read_bytes())[kind.name])
    assert [one["last_iteration"] for one in records] == [3, 7]
    assert records[0]["id"] == records[1]["id"]
    if name == "aim":
        (metric,) = [one for one in package.Run(records[0]["id"]).metrics() if one.name == "total_loss"]
        assert sorted(metric.dataframe()["step"]) == [*range(8)]


class SQLiteTracker(Tracker):
    name = "sqlite3"

    def begin_run(self, run_id: str | None) -> str:
        self.database = sqlite3.connect(self.folder / "metrics.db")
        self.database.execute("CREATE TABLE IF NOT EXISTS metrics (iteration, name, value)")
        return "metrics.db"

    def send(self, rows: Mapping[int, Mapping[str, float]]) -> None:
        values = [(iteration, *one) for iteration, row in rows.items() for one in row.items()]
        self.database.executemany("INSERT INTO metrics VALUES (?, ?, ?)", values)
        self.database.commit()

    def end_run(self, run_id: str) -> None:
        self.database.close()


class Fails(SQLiteTracker):
    def send(self, rows: Mapping[int, Mapping[str, float]]) -> None:
        raise ConnectionError("no route to the service")


def trained(kind: type[Tracker], folder: Path, epochs: int = 2) -> Trainer:
    class Own(Trainer):
        def build_writers(self) -> list[EventWriter]:
            return [*super().build_writers(), kind(self.output_dir)]

    config = TrainingConfig(
        output_dir=folder, num_epochs=epochs, batch_size=8, loss="MSELoss", metrics=[], log_steps=1,
        resume_from_checkpoint=epochs > 2 or None,
    )  # fmt: skip
    trainer = Own(nn.Linear(4, 1), config, TensorDataset(torch.randn(32, 4), torch.randn(32, 1)))
    trainer.train()
    return trainer


def test_ten_lines_are_a_tracker(tmp_path: Path) -> None:
    trained(SQLiteTracker, tmp_path)
    trained(SQLiteTracker, tmp_path, epochs=3)
    database = sqlite3.connect(tmp_path / "metrics.db")
    found = database.execute("SELECT iteration FROM metrics WHERE name = 'total_loss'").fetchall()
    database.close()
    assert [iteration for (iteration,) in found] == [*range(12)]


def test_a_tracker_that_fails_does_not_end_the_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, logger="trainwright.events"):
        trainer = trained(Fails, tmp_path)
    assert trainer.iter == trainer.max_iter == 8
    messages: list[Any] = [one.getMessage() for one in caplog.records]
    assert len(messages) == 1
    assert "no route to the service" in messages[0]
