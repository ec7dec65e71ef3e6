"""Lines and bars that show how far an epoch is, with a terminal and without."""

import csv
import gc
import logging
import re
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.hooks.callbacks.conftest import STEPS, SmallTrainer
from tests.ranks import on_ranks
from tests.toys import Classifier, file_config, points
from trainwright import DefaultTrainer, Trainer, TrainingConfig, hooks
from trainwright.base.dist import get_rank
from trainwright.engine.loop import TrainerBase
from trainwright.events import EventStorage
from trainwright.events.writers.progress import live_bars
from trainwright.hooks import CallbackHook, HookBase, PrintCallback, ProgressBarCallback
from trainwright.hooks.callbacks.progress import EpochLines, line_plan

DATA = TensorDataset(torch.randn(400, 4), torch.randint(2, (400,)))


class Slow(HookBase):
    """Each step takes a second of a clock that is not real."""

    now = 0.0

    def after_step(self) -> None:
        Slow.now += 1.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    Slow.now = 0.0
    gc.collect()  # a loader that an earlier test has left would wait for its workers by this clock, forever
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
    return [r.getMessage() for r in caplog.records if "  step " in r.getMessage()]


@pytest.mark.usefixtures("clock")
def test_a_line_every_half_minute(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = lines(tmp_path, caplog)
    assert 5 <= len(found) <= 7  # 200 seconds
    assert found[0].startswith("Epoch 1/2  step 30/100  total_loss ")
    assert found[0].endswith("1:10")
    assert any("Epoch 2/2 " in line for line in found)


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("settings", [{"log_steps": 10}, {"print_steps": 50}, {"progress_bar": False}], ids=str)
def test_not_where_lines_are_asked_for_by_steps(
    settings: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert lines(tmp_path, caplog, **settings) == []


def test_printed_lines(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = SmallTrainer([PrintCallback(2, step_frequency=2)], scores=[0.5, 0.75])
    trainer.train(0, 6)
    assert capsys.readouterr().out.splitlines() == [
        "epoch=1/2, global_step=2, epoch_loss=1.5",
        "epoch=1/2, eval_global_step=0, eval_epoch_loss=1.0, eval_epoch_metric=0.5",
        "epoch=2/2, global_step=4, epoch_loss=4.0",
        "epoch=2/2, global_step=6, epoch_loss=5.0",
        "epoch=2/2, eval_global_step=1, eval_epoch_loss=0.5, eval_epoch_metric=0.75",
    ]


def test_a_line_for_each_epoch_where_there_is_no_terminal_for_a_bar(capsys: pytest.CaptureFixture[str]) -> None:
    SmallTrainer([ProgressBarCallback(2, range(STEPS))], scores=[0.5, 0.75]).train(0, 6)
    assert capsys.readouterr().err.splitlines() == [
        "[epoch 1/2] loss=2.000, eval_loss=1.000, eval_metric=0.500: 3/3 steps",
        "[epoch 2/2] loss=5.000, eval_loss=0.500, eval_metric=0.750: 3/3 steps",
    ]


def test_the_steps_of_an_epoch_continue_after_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = SmallTrainer([ProgressBarCallback(2, range(STEPS))], tmp_path, saves=True, fails_at=2)
    with pytest.raises(ZeroDivisionError):
        first.train(0, 6)
    assert not live_bars
    capsys.readouterr()
    second = SmallTrainer([ProgressBarCallback(2, range(STEPS))], tmp_path)
    second.checkpointer.load(tmp_path / "model_0000001")
    second.train(second.start_iter, 3)
    assert capsys.readouterr().err.splitlines()[0].endswith(": 3/3 steps")


@pytest.mark.parametrize("kind", ["TensorBoard", "Print", "ProgressBar"])
def test_the_other_spelling_is_the_same_class(kind: str) -> None:
    assert getattr(hooks, f"{kind}CallBack") is getattr(hooks, f"{kind}Callback")


def epochs(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [re.sub(r"  [\d.]+ s(  ETA .*)?$", "", m) for m in caplog.messages if m.startswith("Epoch ")]


class Counts(TrainerBase):
    """The loss of an iteration is its number; every second iteration is evaluated."""

    samples_per_iter = 1

    def run_step(self) -> None:
        self.storage.put_scalar("total_loss", torch.tensor(float(self.iter)))


@pytest.mark.parametrize(
    ("log_period", "eval_period", "expected"),
    [
        (0, 0, ["Epoch 1/3  total_loss 0.5000", "Epoch 2/3  total_loss 2.500", "Epoch 3/3  total_loss 4.000"]),
        (3, 0, ["Epoch 2/3  total_loss 2.500", "Epoch 3/3  total_loss 4.000"]),  # of the last of two epochs
        (100, 0, ["Epoch 3/3  total_loss 4.000"]),  # of the last epoch, as its row in the files
        (100, 4, ["Epoch 2/3  total_loss 2.500", "Epoch 3/3  total_loss 4.000"]),  # between two log periods
    ],
)
def test_a_line_after_each_epoch_log_period_or_evaluation(
    log_period: int, eval_period: int, expected: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert line_plan(5, 5, log_period) is None  # of a single epoch
    trainer = Counts()
    trainer.register_hooks([EpochLines(lambda: line_plan(2, 5, log_period, eval_period=eval_period or None))])
    with caplog.at_level(logging.INFO):
        trainer.train(0, 5)
    assert epochs(caplog) == expected


def test_epochs_that_end_within_an_iteration(caplog: pytest.LogCaptureFixture) -> None:
    trainer = Counts()
    trainer.register_hooks(
        [EpochLines(lambda: line_plan(Fraction(5, 2), 8, 0))]
    )  # ends after 2.5, 5 and 7.5 iterations
    ends = []
    trainer.register_hooks([CallbackHook(after_step=lambda trainer: ends.append(len(epochs(caplog))))])
    with caplog.at_level(logging.INFO):
        trainer.train(0, 8)
    assert ends == [0, 0, 1, 1, 2, 2, 2, 2]
    assert [line[:9] for line in epochs(caplog)] == ["Epoch 1/3", "Epoch 2/3", "Epoch 3/3"]


def test_an_epoch_line_has_the_final_evaluation(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = TrainingConfig(
        output_dir=tmp_path, num_epochs=2, batch_size=100, metrics=None, log_steps=2, tensorboard=None
    )
    with caplog.at_level(logging.INFO):
        Trainer(nn.Linear(4, 2), config, DATA, DATA).train()
    first, last = epochs(caplog)
    assert re.fullmatch(r"Epoch 1/2  total_loss [\d.]+  eval_loss [\d.]+ \(best\)", first)
    assert re.fullmatch(r"Epoch 2/2  total_loss [\d.]+  eval_loss [\d.]+( \(best\))?", last)
    others = [record for record in caplog.records if record.message.startswith(("Best ", "Evaluation "))]
    assert all(record.file_only for record in others)


def test_the_line_of_a_resumed_epoch_has_the_mean_of_all_of_it(caplog: pytest.LogCaptureFixture) -> None:
    first, second = Counts(), Counts()
    first.train(0, 3)
    second.storage = EventStorage(3)
    second.register_hooks([CallbackHook(before_train=lambda t: t.storage.load_state_dict(first.storage.state_dict()))])
    second.register_hooks([EpochLines(lambda: line_plan(4, 8, 0))])
    with caplog.at_level(logging.INFO):
        second.train(3, 8)
    assert epochs(caplog) == ["Epoch 1/2  total_loss 1.500", "Epoch 2/2  total_loss 5.500"]


def lines_on_rank(folder: str) -> list[str]:
    """The lines of epochs of this rank, which alone has a progress bar if it is the first."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    cfg = file_config(Path(folder), Classifier, points, train_epoch=4, train_micro_batch_size=2, log_period=3)
    cfg.train.progress_bar = get_rank() == 0
    trainer = DefaultTrainer(cfg)
    logging.getLogger("trainwright").addHandler(handler)
    trainer.train()
    return [text for text in records if text.startswith("Epoch ")]


def test_the_line_of_an_epoch_has_the_mean_over_all_processes(tmp_path: Path) -> None:
    of_first, of_second = on_ranks(lines_on_rank, str(tmp_path))
    assert of_second == []
    rows = list(csv.DictReader((tmp_path / "losses.csv").read_text().splitlines()))
    losses = [float(row["total_loss"]) for row in rows]
    length = len(losses) // 4
    assert length % 3 != 0  # no row of the log is at the end of an epoch
    means = [sum(losses[at : at + length]) / length for at in range(0, len(losses), length)]
    shown = [float(re.findall(r"total_loss ([\d.]+)", line)[0]) for line in of_first]
    assert shown == pytest.approx(means, rel=1e-3)
