"""Early stopping, and the names of metrics, as a TrainingConfig requests them."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from tests.engine.trainer.conftest import INPUTS, PAIRS, Scripted, config, make
from trainwright import Trainer, TrainerConfig, TrainingConfig
from trainwright.hooks import EarlyStoppingCallback


def test_early_stopping_stops_stays_stopped_and_goes_on_with_more_patience(tmp_path: Path) -> None:
    def run(patience: int, **settings: Any) -> Scripted:
        stopping = {"monitor": "eval_epoch_loss", "patience": patience, "mode": "min"}
        trainer = Scripted(make(), config(tmp_path, num_epochs=4, early_stopping=stopping, **settings), PAIRS, PAIRS)
        trainer.train()
        return trainer

    assert run(1).epoch == 3  # 2.0 is not better than 1.0
    assert os.readlink(tmp_path / "final_epoch") == "checkpoints/15"
    assert run(1, resume_from_checkpoint=True).epoch == 3
    assert run(2, resume_from_checkpoint=True).epoch == 4


def test_the_default_early_stopping_is_no_trouble_where_there_is_no_metric(tmp_path: Path) -> None:
    data = TensorDataset(INPUTS, INPUTS[:, :3])
    settings = TrainingConfig(output_dir=tmp_path, loss="MSELoss", progress_bar=False)
    trainer = Trainer(make(), settings, data, data)
    assert set(trainer.train()) == {"loss"}


def test_the_default_early_stopping_goes_by_what_chooses_the_best_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Constant(Scripted):
        losses = (4.0, 3.0, 2.0, 1.0, 0.9, 0.8, 0.7, 0.6)

        def evaluate(self, dataset: Any = None) -> dict[str, Any]:  # type: ignore[override]
            return {**super().evaluate(), "accuracy": 0.5}

    def epochs(folder: str, **settings: Any) -> int:
        given = TrainingConfig(output_dir=tmp_path / folder, num_epochs=8, progress_bar=False, **settings)
        trainer = Constant(make(), given, PAIRS, PAIRS)
        trainer.train()
        return trainer.epoch

    caplog.set_level("INFO", "trainwright")
    assert epochs("loss") == 8
    (start,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("Early stopping")]
    assert all(fact in start for fact in ("4 epochs", "eval_loss (lower)", "early_stopping=None"))
    caplog.clear()
    assert epochs("accuracy", metric_for_best_model="accuracy", early_stopping={"patience": 2}) == 3
    (_, end) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("Early stopping")]
    for part in ("eval_accuracy was no better", "patience=2", "epoch 3", "early_stopping=None turns it off"):
        assert part in end
    assert epochs("named", early_stopping={"monitor": "eval_accuracy", "mode": "max"}) == 5


def test_early_stopping_by_the_metric_goes_by_the_loss_where_there_is_no_metric(tmp_path: Path) -> None:
    class LossAlone(Scripted):
        def evaluate(self, dataset: Any = None) -> dict[str, Any]:  # type: ignore[override]
            return {"loss": super().evaluate()["loss"]}

    def run(patience: int, **settings: Any) -> int:
        stopping = {"monitor": "eval_epoch_metric", "patience": patience, "mode": "max"}
        trainer = LossAlone(make(), config(tmp_path, num_epochs=4, early_stopping=stopping, **settings), PAIRS, PAIRS)
        trainer.train()
        return trainer.epoch

    assert run(1) == 3  # 2.0 is not better than 1.0
    assert run(1, resume_from_checkpoint=True) == 3
    assert run(2, resume_from_checkpoint=True) == 4


def test_a_monitor_by_its_plain_name_is_known_to_a_resume(tmp_path: Path) -> None:
    def run(patience: int, **settings: Any) -> int:
        stopping = {"monitor": "score", "patience": patience, "mode": "max"}
        trainer = Scripted(make(), config(tmp_path, num_epochs=4, early_stopping=stopping, **settings), PAIRS, PAIRS)
        trainer.train()
        return trainer.epoch

    assert run(1) == 3
    assert run(1, resume_from_checkpoint=True) == 3


def test_a_callback_of_the_users_stands_in_for_the_configurations(tmp_path: Path) -> None:
    settings = config(tmp_path, num_epochs=4, early_stopping={"monitor": "eval_epoch_loss", "patience": 1})
    trainer = Scripted(make(), settings, PAIRS, PAIRS)
    trainer.add_callback(EarlyStoppingCallback(trainer.trainercontrol, "eval_epoch_loss", patience=9, mode="min"))
    trainer.train()
    assert trainer.epoch == 4
    assert [type(callback).__name__ for callback in trainer.callbacks] == ["EarlyStoppingCallback"]


def test_default_early_stopping_knows_which_way_is_better(tmp_path: Path) -> None:
    data = TensorDataset(INPUTS, INPUTS[:, :3] * 3)
    settings = TrainingConfig(
        output_dir=tmp_path, loss="MSELoss", metric="MeanSquaredError", num_epochs=10, lr=1e-2, progress_bar=False
    )
    trainer = Trainer(make(), settings, data, data)
    trainer.train()
    assert trainer.epoch == 10  # the error falls all the time


def test_the_names_of_the_trainer_config_page_are_in_csv_and_tensorboard(tmp_path: Path) -> None:
    inputs = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
    data = [(x, int(x[0] > 0)) for x in inputs]

    config = TrainerConfig(
        output_dir=tmp_path, task="text_classification", num_epochs=2, batch_size=8, num_dataloader_workers=0,
        progress_bar=False, loss="CrossEntropyLoss",
    )  # fmt: skip
    trainer = Trainer(torch.nn.Linear(4, 2), config, data, data)
    trainer.train()
    logs = trainer.load_csv_logs()
    assert logs["step"] == [3.0, 6.0, 6.0]
    assert logs["train.loss"] == logs["total_loss"]
    assert logs["evaluation.accuracy"][-1] == trainer.last_eval_results["accuracy"]
    assert {"train.loss", "total_loss"} <= events_in(tmp_path / "logs")


def events_in(folder: Path) -> set[str]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return set(events.Tags()["scalars"])
