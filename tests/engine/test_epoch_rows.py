"""Rows at the end of an epoch: the epoch's means, the same values as its line, the summary, and the table of runs."""

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from torch import nn

from tests.toys import Classifier, file_config, pairs, points, quiet
from trainwright import DefaultTrainer, Trainer
from trainwright.cli.run_folder import read_run
from trainwright.events import EventStorage

EPOCH = 30  # iterations, more than the window of other rows


def python(folder: Path, epochs: int, **settings: Any) -> Trainer:
    given = {"num_epochs": epochs, "batch_size": 2, "log_steps": 7, "save_steps": 7, "progress_bar": True} | settings
    torch.manual_seed(0)
    return Trainer(nn.Linear(6, 3), quiet(folder, **given), pairs(2 * EPOCH), pairs(2 * EPOCH))


def config_file(folder: Path, epochs: int, **train: Any) -> DefaultTrainer:
    cfg = file_config(folder, lambda: Classifier(seed=0), lambda: points(2 * EPOCH), lambda: points(2 * EPOCH))
    cfg.train.update({"train_iter": 0, "train_epoch": epochs, "train_micro_batch_size": 2, "log_period": 7, **train})
    cfg.train.checkpointer.period = 7
    cfg.train.evaluation.update({"eval_after_n_epoch": 1, "eval_metric": "Acc@1"})
    cfg.train.evaluation.evaluator.topk = (1,)
    return DefaultTrainer(cfg)


def rows_of(folder: Path) -> dict[int, dict[str, float]]:
    read = [json.loads(line) for line in (folder / "metrics.json").read_text().splitlines()]
    return {row.pop("iteration"): row for row in read}


def losses_of(folder: Path) -> list[float]:
    with open(folder / "losses.csv", newline="") as file:
        return [float(row["total_loss"]) for row in csv.DictReader(file)]


@pytest.mark.parametrize("build", [python, config_file])
def test_the_end_of_an_epoch_has_one_value_everywhere(
    build: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "trainwright")
    build(tmp_path, 2).train()
    losses, rows = losses_of(tmp_path), rows_of(tmp_path)
    means = [fmean(losses[:EPOCH]), fmean(losses[EPOCH:])]
    assert [rows[last]["total_loss"] for last in (EPOCH - 1, 2 * EPOCH - 1)] == pytest.approx(means, rel=1e-12)
    assert rows[6]["total_loss"] == pytest.approx(sorted(losses[:7])[3])  # other rows: the median of a window
    said = re.findall(r"(Epoch \d|Last).*?total_loss ([\d.]+)", caplog.text)
    shown = [f"{mean:#.4g}" for mean in means]
    assert said == [("Epoch 1", shown[0]), ("Epoch 2", shown[1]), ("Last", shown[1])]
    assert read_run(tmp_path, tmp_path.parent).loss == pytest.approx(means[1], rel=1e-12)
    if build is python:
        with open(tmp_path / "metrics.csv", newline="") as file:
            table = {int(row["iteration"]): row["total_loss"] for row in csv.DictReader(file)}
        assert {at: float(table[at]) for at in rows if "total_loss" in rows[at]} == {
            at: row["total_loss"] for at, row in rows.items() if "total_loss" in row
        }


@pytest.mark.parametrize("build", [python, config_file])
def test_a_longer_run_has_the_rows_of_an_uninterrupted_one(build: Callable[..., Any], tmp_path: Path) -> None:
    def rows(folder: Path) -> dict[int, dict[str, float]]:
        times = ("time", "data_time")
        return {at: {n: v for n, v in row.items() if n not in times} for at, row in rows_of(folder).items()}

    resume = {"resume_from_checkpoint": True} if build is python else {"resume": True}
    build(tmp_path / "whole", 3).train()
    build(tmp_path / "parts", 1).train()
    build(tmp_path / "parts", 3, **resume).train()
    whole, parts = rows(tmp_path / "whole"), rows(tmp_path / "parts")
    assert parts.keys() == whole.keys()
    if build is python:  # of config files the schedule depends on the length
        assert parts == whole
    means = [fmean(losses_of(tmp_path / "parts")[first:][:EPOCH]) for first in (0, EPOCH, 2 * EPOCH)]
    assert [parts[EPOCH * n - 1]["total_loss"] for n in (1, 2, 3)] == pytest.approx(means, rel=1e-12)


@pytest.mark.parametrize("stops", [[], [100], [1500, 2600]])
def test_the_mean_of_a_long_epoch_survives_a_resume(stops: list[int]) -> None:
    """A checkpoint has the newest thousand values of a metric."""
    storage = EventStorage()
    for iteration in range(3000):
        if iteration in stops:
            state = json.loads(json.dumps(storage.state_dict()))
            storage = EventStorage(iteration)
            storage.load_state_dict(state)
        storage.put_scalar("total_loss", 1 / (1 + iteration))
        storage.step()
    storage.end_epoch(0, 3000)
    total = 0.0
    for iteration in range(3000):
        total += 1 / (1 + iteration)
    assert storage.latest_with_smoothing_hint()["total_loss"] == (total / 3000, 2999)
    storage.put_scalar("total_loss", 7.0)  # the next epoch
    assert storage.latest_with_smoothing_hint(1)["total_loss"] == (7.0, 3000)
