"""The plan of a run and its hooks: evaluations, rows and checkpoints, each when it is due."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.trainer import contracts
from tests.engine.trainer.conftest import PAIRS, Scripted, config, make
from trainwright import Trainer
from trainwright.config.errors import ConfigError
from trainwright.hooks import Callback


def test_shares_of_steps(tmp_path: Path) -> None:
    settings = {"num_epochs": 4, "save_steps": 0.3, "model_checkpoint": None, "log_steps": 0.5}
    Trainer(make(), config(tmp_path, **settings), PAIRS).train()
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("[0-9]*")) == ["06", "12", "18", "20"]
    rows = [json.loads(line)["iteration"] for line in (tmp_path / "metrics.json").read_text().splitlines()]
    assert {9, 19} <= set(rows)
    few = Trainer(make(), config(tmp_path / "few", num_epochs=2, max_steps=0.4), PAIRS)
    assert few.total_steps == 4  # two of five batches, twice


class Recorder(Callback):
    def __init__(self, calls: list[str]) -> None:
        for moment in (name for name in dir(Callback) if name.startswith("on_")):
            setattr(self, moment, self._noting(moment, calls))

    @staticmethod
    def _noting(moment: str, calls: list[str]) -> Any:
        return lambda *arguments: calls.append(moment.removeprefix("on_"))


def test_the_order_of_calls_is_that_of_the_document(tmp_path: Path) -> None:
    calls: list[str] = []
    trainer = Trainer(make(), config(tmp_path, batch_size=20, num_epochs=2, eval_batch_size=40), PAIRS, PAIRS)
    trainer.add_callback(Recorder(calls))
    trainer.train()
    train_batch = ["train_batch_begin", "batch_begin", "train_batch_end", "batch_end"]
    evaluation = ["eval_begin", "eval_batch_begin", "batch_begin", "eval_batch_end", "batch_end", "eval_end"]
    epoch = ["epoch_begin", *train_batch, *train_batch, *evaluation, "epoch_end"]
    assert calls == ["train_begin", *epoch, *epoch, "train_end"]


def test_freeze_bn_keeps_running_statistics(tmp_path: Path) -> None:
    frozen, free = make(), make()
    Trainer(frozen, config(tmp_path / "a", freeze_bn=True), PAIRS).train()
    Trainer(free, config(tmp_path / "b"), PAIRS).train()
    assert torch.equal(frozen[1].running_mean, make()[1].running_mean)
    assert not torch.equal(free[1].running_mean, make()[1].running_mean)


def test_each_evaluation_is_a_row_however_rarely_is_logged(tmp_path: Path) -> None:
    Scripted(make(), config(tmp_path, num_epochs=4, log_steps=1000), PAIRS, PAIRS).train()
    rows = [json.loads(line) for line in (tmp_path / "metrics.json").read_text().splitlines()]
    found = [(row["iteration"], row["evaluation/loss"]) for row in rows if "evaluation/loss" in row]
    assert dict(found) == {4: 3.0, 9: 1.0, 14: 2.0, 20: 1.5}


def test_a_callback_may_wish_for_an_evaluation_and_for_a_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Wishing(Callback):
        def on_train_batch_end(self, batch: Any, logs: Any) -> None:
            if logs["global_step"] == 2:
                self.trainercontrol.should_evaluate = self.trainercontrol.should_log = True

        def on_eval_end(self, logs: Any) -> None:
            seen.append(logs["eval_epoch_loss"])

    seen: list[float] = []
    trainer = Trainer(make(), config(tmp_path, num_epochs=1, print_steps=100), PAIRS, PAIRS)
    trainer.add_callback(Wishing())
    trainer.train()
    assert len(seen) == 2
    rows = [json.loads(line) for line in (tmp_path / "metrics.json").read_text().splitlines()]
    assert [row["evaluation/loss"] for row in rows if "evaluation/loss" in row] == pytest.approx(seen)
    assert capsys.readouterr().out.count("eval_epoch_loss=") == 2


def test_evaluations_and_checkpoints_are_due_by_steps_at_the_end_of_their_window(tmp_path: Path) -> None:
    evaluated: list[int] = []

    class Watching(Trainer):
        def evaluate(self, dataset: Any = None) -> dict[str, Any]:
            evaluated.append(self.state.global_step)
            return super().evaluate(dataset)

    settings = {"eval_strategy": "step", "eval_steps": 5, "save_steps": 4, "gradient_accumulation_steps": 3}
    Watching(
        contracts.make(contracts.Net), contracts.config(tmp_path, **settings), contracts.PAIRS, contracts.PAIRS
    ).train()
    assert evaluated == [6, 10, 14]  # windows end at 3, 6, 7, 10, 13, 14
    names = sorted(path.name for path in (tmp_path / "checkpoints").glob("[0-9]*"))
    assert names == ["06", "10", "13", "14"]


def test_what_is_set_between_two_trainings_counts_for_the_second(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = contracts.config(tmp_path, num_epochs=2, save_freq=1)
    trainer = Trainer(contracts.make(contracts.Net), settings, contracts.PAIRS, contracts.PAIRS)
    trainer.inner_training_loop(1)
    events = list(tmp_path.glob("events.out.tfevents.*"))
    settings.tensorboard = None
    settings.print_steps = 7
    trainer.train()
    assert list(tmp_path.glob("events.out.tfevents.*")) == events
    assert capsys.readouterr().out.startswith("epoch=2/2, global_step=14, ")


def one_cycle(folder: Path, total_steps: int, **settings: Any) -> Trainer:
    schedule = {"name_": "one_cycle", "max_lr": 0.1, "total_steps": total_steps}
    return Trainer(make(), config(folder, num_epochs=3, lr_scheduler=schedule, **settings), PAIRS)


def test_a_one_cycle_schedule_has_the_length_of_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match=r"total_steps=2, .* 3 times .*total_steps=3, or lr_"):
        one_cycle(tmp_path, 2).train()
    with pytest.raises(ConfigError, match=r"total_steps=14, .* 15 times .*total_steps=15\.$"):
        one_cycle(tmp_path, 14, lr_scheduling_steps=1).train()
    assert not (tmp_path / "metrics.json").exists()
    one_cycle(tmp_path, 3).train()
    one_cycle(tmp_path, 15, lr_scheduling_steps=1).train()
    assert "does not complete its cycle" not in caplog.text
    one_cycle(tmp_path, 15).train()
    assert "total_steps=15, but this run steps it only 3 times (every 5 steps)" in caplog.text
