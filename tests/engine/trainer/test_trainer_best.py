"""What the Python API keeps: epochs by name, the best checkpoint, the newest few; and what stops it early."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from trainwright import Trainer, TrainingConfig
from trainwright.checkpoint import Checkpointer, verify
from trainwright.config.errors import ConfigError
from trainwright.hooks import Callback, EarlyStoppingCallback
from trainwright.optim import LayerFreezer

INPUTS = torch.randn(40, 6, generator=torch.Generator().manual_seed(5))
LABELS = torch.randint(3, (40,), generator=torch.Generator().manual_seed(6))
PAIRS = TensorDataset(INPUTS, LABELS)


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))


def config(folder: Path, **settings: Any) -> TrainingConfig:
    given = {"lr_scheduler_type": None, "learning_rate": 0.01, "progress_bar": False, "early_stopping": None}
    return TrainingConfig(output_dir=folder, **{**given, **settings})


class Told(Trainer):
    """Evaluations give these, one after the other."""

    losses = (3.0, 1.0, 2.0, 1.5)

    def evaluate(self, dataset: Any = None) -> dict[str, Any]:  # type: ignore[override]
        loss = self.losses[self.state.global_step // 5 - 1]
        return {"loss": loss, "score": -loss, "cer": loss / 10}


def weights(path: Path) -> dict[str, Any]:
    model = make()
    Checkpointer(model).load(path, checkpointables=[], strict=True)
    return model.state_dict()


def equal(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("metric", ["loss", "evaluation.cer", "score", "evaluation.score", "eval_loss"])
def test_the_best_checkpoint_is_kept_and_loaded(metric: str, tmp_path: Path) -> None:
    settings = {"num_epochs": 4, "metric_for_best_model": metric, "load_best_model_at_end": True}
    settings |= {"greater_is_better": True} if "score" in metric else {}
    trainer = Told(make(), config(tmp_path, **settings), PAIRS, PAIRS)
    trainer.train()
    best = tmp_path / "checkpoints" / "model_best"
    assert verify(best).iteration == 9
    assert equal(weights(best), weights(tmp_path / "epoch_2"))
    assert equal(trainer.model.state_dict(), weights(best))
    assert not equal(weights(tmp_path / "final_epoch"), weights(best))


def test_the_best_one_survives_a_resume(tmp_path: Path) -> None:
    Told(make(), config(tmp_path, num_epochs=4, max_steps=15), PAIRS, PAIRS).train()
    resumed = Told(make(), config(tmp_path, num_epochs=4, resume_from_checkpoint=True), PAIRS, PAIRS)
    resumed.train()
    assert verify(tmp_path / "checkpoints" / "model_best").iteration == 9


def test_a_metric_of_training_can_tell_the_best(tmp_path: Path) -> None:
    trainer = Trainer(make(), config(tmp_path, num_epochs=3, metric_for_best_model="train.accuracy"), PAIRS, PAIRS)
    trainer.train()
    accuracies = {i: value for value, i in trainer.storage.history("accuracy").values()}
    assert list(accuracies) == [4, 9, 14]
    best = max(accuracies, key=lambda i: (accuracies[i], -i))
    assert verify(tmp_path / "checkpoints" / "model_best").iteration == best


def test_epochs_have_names_beside_the_checkpoints_and_cards_in_them(tmp_path: Path) -> None:
    Trainer(make(), config(tmp_path, num_epochs=2), PAIRS, PAIRS).train()
    assert os.readlink(tmp_path / "epoch_1") == "checkpoints/05"
    assert os.readlink(tmp_path / "epoch_2") == os.readlink(tmp_path / "final_epoch") == "checkpoints/10"
    card = (tmp_path / "epoch_2" / "README.md").read_text()
    assert card.startswith("---\n")
    assert "Sequential" in card


@pytest.mark.parametrize("asynchronous_best", [True, False])
def test_only_the_newest_stay_and_the_best(asynchronous_best: bool, tmp_path: Path) -> None:
    settings = {"num_epochs": 4, "max_to_keep": 1, "eval_strategy": "epoch" if asynchronous_best else "no"}
    Told(make(), config(tmp_path, **settings), PAIRS, PAIRS).train()
    steps = sorted(path.name for path in (tmp_path / "checkpoints").glob("[0-9]*"))
    assert steps == ["20"]
    assert sorted(path.name for path in tmp_path.glob("*epoch*")) == ["epoch_4", "final_epoch"]
    if asynchronous_best:
        assert verify(tmp_path / "checkpoints" / "model_best").iteration == 9


def test_shares_of_steps(tmp_path: Path) -> None:
    settings = {"num_epochs": 4, "save_steps": 0.3, "model_checkpoint": None, "log_steps": 0.5}
    Trainer(make(), config(tmp_path, **settings), PAIRS).train()
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("[0-9]*")) == ["06", "12", "18", "20"]
    rows = [json.loads(line)["iteration"] for line in (tmp_path / "metrics.json").read_text().splitlines()]
    assert {9, 19} <= set(rows)
    few = Trainer(make(), config(tmp_path / "few", num_epochs=2, max_steps=0.4), PAIRS)
    assert few.total_steps == 4  # two of five batches, twice


def test_save_enabled_false_saves_nothing(tmp_path: Path) -> None:
    Trainer(make(), config(tmp_path, save_enabled=False), PAIRS, PAIRS).train()
    assert not (tmp_path / "checkpoints").exists()
    assert not (tmp_path / "final_epoch").exists()


def test_a_folder_that_holds_a_run_may_be_refused(tmp_path: Path) -> None:
    Trainer(make(), config(tmp_path), PAIRS).train()
    with pytest.raises(ConfigError, match=r"output_dir: .* holds a run, and overwrite_output_dir is False"):
        Trainer(make(), config(tmp_path, overwrite_output_dir=False), PAIRS)
    Trainer(make(), config(tmp_path, overwrite_output_dir=False, resume_from_checkpoint=True), PAIRS)


def test_early_stopping_stops_stays_stopped_and_goes_on_with_more_patience(tmp_path: Path) -> None:
    def run(patience: int, **settings: Any) -> Told:
        stopping = {"monitor": "eval_epoch_loss", "patience": patience, "mode": "min"}
        trainer = Told(make(), config(tmp_path, num_epochs=4, early_stopping=stopping, **settings), PAIRS, PAIRS)
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
    class Constant(Told):
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
    assert start == (
        "Early stopping: stops after 4 epochs without a better eval_loss (lower); early_stopping=None turns it off."
    )
    caplog.clear()
    assert epochs("accuracy", metric_for_best_model="accuracy", early_stopping={"patience": 2}) == 3
    (_, end) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("Early stopping")]
    for part in ("eval_accuracy was no better", "patience=2", "epoch 3", "early_stopping=None turns it off"):
        assert part in end
    assert epochs("named", early_stopping={"monitor": "eval_accuracy", "mode": "max"}) == 5


def test_early_stopping_by_the_metric_goes_by_the_loss_where_there_is_no_metric(tmp_path: Path) -> None:
    class LossAlone(Told):
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
        trainer = Told(make(), config(tmp_path, num_epochs=4, early_stopping=stopping, **settings), PAIRS, PAIRS)
        trainer.train()
        return trainer.epoch

    assert run(1) == 3
    assert run(1, resume_from_checkpoint=True) == 3


def test_a_callback_of_the_users_stands_in_for_the_configurations(tmp_path: Path) -> None:
    settings = config(tmp_path, num_epochs=4, early_stopping={"monitor": "eval_epoch_loss", "patience": 1})
    trainer = Told(make(), settings, PAIRS, PAIRS)
    trainer.add_callback(EarlyStoppingCallback(trainer.trainercontrol, "eval_epoch_loss", patience=9, mode="min"))
    trainer.train()
    assert trainer.epoch == 4
    assert [type(callback).__name__ for callback in trainer.callbacks] == ["EarlyStoppingCallback"]


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


def test_layers_may_be_frozen_between_two_parts_of_a_run(tmp_path: Path) -> None:
    Trainer(make(), config(tmp_path, num_epochs=2, max_steps=5), PAIRS).train()
    model = make()
    LayerFreezer(model).by_idx([0])
    trainer = Trainer(model, config(tmp_path, num_epochs=2, resume_from_checkpoint=True), PAIRS)
    before = model[0].weight.clone()
    trainer.train()
    assert torch.equal(model[0].weight, before)
    assert trainer.state.global_step == 10
    assert not torch.equal(model[4].weight, weights(tmp_path / "epoch_1")["4.weight"])


def test_freeze_bn_keeps_running_statistics(tmp_path: Path) -> None:
    frozen, free = make(), make()
    Trainer(frozen, config(tmp_path / "a", freeze_bn=True), PAIRS).train()
    Trainer(free, config(tmp_path / "b"), PAIRS).train()
    assert torch.equal(frozen[1].running_mean, make()[1].running_mean)
    assert not torch.equal(free[1].running_mean, make()[1].running_mean)


def rates(trainer: Trainer) -> list[float]:
    return [rate for rate, _ in trainer.storage.history("lr").values()]


def test_schedules_of_torch_step_once_an_epoch_or_as_often_as_said(tmp_path: Path) -> None:
    settings = {"num_epochs": 3, "lr_scheduler": "step", "lr_scheduler_kwargs": {"step_size": 1, "gamma": 0.1}}
    trainer = Trainer(make(), config(tmp_path / "a", **settings), PAIRS)
    trainer.train()
    assert rates(trainer) == pytest.approx([0.01] * 5 + [0.001] * 5 + [0.0001] * 5)
    trainer = Trainer(make(), config(tmp_path / "b", **settings, lr_scheduling_steps=10), PAIRS)
    trainer.train()
    assert rates(trainer) == pytest.approx([0.01] * 10 + [0.001] * 5)


def test_a_plateau_is_one_of_the_metric_for_the_best_model(tmp_path: Path) -> None:
    settings = {"lr_scheduler": "reduce_on_plateau", "lr_scheduler_kwargs": {"patience": 0, "factor": 0.1}}
    trainer = Told(make(), config(tmp_path, num_epochs=4, **settings), PAIRS, PAIRS)
    trainer.train()
    assert rates(trainer) == pytest.approx([0.01] * 15 + [0.001] * 5)  # 2.0 after 1.0


def test_float16_trains_with_a_scaler_that_is_saved(tmp_path: Path) -> None:
    whole = Trainer(make(), config(tmp_path / "whole", mixed_precision="fp16"), PAIRS)
    whole.train()
    assert "grad_scaler.json" in os.listdir(tmp_path / "whole" / "final_epoch")
    Trainer(make(), config(tmp_path / "parts", mixed_precision="fp16", max_steps=7), PAIRS).train()
    resumed = Trainer(make(), config(tmp_path / "parts", mixed_precision="fp16", resume_from_checkpoint=True), PAIRS)
    resumed.train()
    assert equal(resumed.model.state_dict(), whole.model.state_dict())
    plain = Trainer(make(), config(tmp_path / "plain"), PAIRS)
    plain.train()
    for a, b in zip(whole.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=0.05, rtol=0.1)  # half a precision: near, not equal


def test_load_csv_logs_gives_columns(tmp_path: Path) -> None:
    trainer = Trainer(make(), config(tmp_path, log_steps=5), PAIRS, PAIRS)
    trainer.train()
    columns = trainer.load_csv_logs()
    assert len(columns["iteration"]) == len(columns["evaluation/loss"])
    assert columns["evaluation/loss"][-1] == pytest.approx(trainer.last_eval_results["loss"])


def test_save_writes_a_folder_with_a_card_and_refuses_to_overwrite(tmp_path: Path) -> None:
    trainer = Trainer(make(), config(tmp_path / "run"), PAIRS)
    trainer.train()
    trainer.save(tmp_path / "saved")
    assert (tmp_path / "saved" / "README.md").is_file()
    verify(tmp_path / "saved")
    with pytest.raises(FileExistsError, match="overwrite=True"):
        trainer.save(tmp_path / "saved", overwrite=False)
    trainer.load(tmp_path / "run" / "epoch_1")
    assert trainer.epoch == 1


def test_each_evaluation_is_a_row_however_rarely_is_logged(tmp_path: Path) -> None:
    Told(make(), config(tmp_path, num_epochs=4, log_steps=1000), PAIRS, PAIRS).train()
    rows = [json.loads(line) for line in (tmp_path / "metrics.json").read_text().splitlines()]
    found = [(row["iteration"], row["evaluation/loss"]) for row in rows if "evaluation/loss" in row]
    assert dict(found) == {4: 3.0, 9: 1.0, 14: 2.0, 20: 1.5}


def test_cards_tell_the_results_of_their_own_weights(tmp_path: Path) -> None:
    Told(make(), config(tmp_path, num_epochs=4), PAIRS, PAIRS).train()

    def results(path: Path) -> set[str]:
        return {
            value for value in ("3.0", "1.0", "2.0", "1.5") if f"value: {value}" in (path / "README.md").read_text()
        }

    assert results(tmp_path / "epoch_1") == {"3.0"}
    assert results(tmp_path / "checkpoints" / "model_best") == {"1.0"}
    assert results(tmp_path / "final_epoch") == {"1.5"}  # saved again after the last evaluation
    assert results(tmp_path) == {"1.5"}  # of the run


def test_default_early_stopping_knows_which_way_is_better(tmp_path: Path) -> None:
    data = TensorDataset(INPUTS, INPUTS[:, :3] * 3)
    settings = TrainingConfig(
        output_dir=tmp_path, loss="MSELoss", metric="MeanSquaredError", num_epochs=10, lr=1e-2, progress_bar=False
    )
    trainer = Trainer(make(), settings, data, data)
    trainer.train()
    assert trainer.epoch == 10  # the error falls all the time


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


def test_a_best_model_that_cannot_be_found_out_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"load_best_model_at_end: got True, but nothing is evaluated"):
        Trainer(make(), config(tmp_path, load_best_model_at_end=True), PAIRS)
    settings = config(tmp_path, load_best_model_at_end=True, metric_for_best_model="acuracy")
    with pytest.raises(
        ConfigError, match=r"got 'acuracy', which the evaluation does not compute.*Did you mean 'accuracy'"
    ):
        Trainer(make(), settings, PAIRS, PAIRS).train()


def test_gradients_are_clipped_as_by_hand(tmp_path: Path) -> None:
    settings = {"max_grad_norm": 0.1, "num_epochs": 1, "optimizer": "SGD", "learning_rate": 0.5, "batch_size": 40}
    model, theirs = nn.Linear(6, 3), nn.Linear(6, 3)
    theirs.load_state_dict(model.state_dict())
    Trainer(model, config(tmp_path, **settings), PAIRS).train()
    torch.nn.functional.cross_entropy(theirs(INPUTS), LABELS).backward()
    assert torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.1) > 0.1
    torch.optim.SGD(theirs.parameters(), lr=0.5).step()
    torch.testing.assert_close(model.weight, theirs.weight)


def test_a_step_without_a_loss_is_an_error(tmp_path: Path) -> None:
    class NoLoss(Trainer):
        def compute_loss(self, model: Any, inputs: Any) -> Any:
            model(inputs[0])

    class NoLogs(Trainer):
        def train_step(self, model: Any, inputs: Any) -> Any:
            super().train_step(model, inputs)

    with pytest.raises(ConfigError, match=r"NoLoss.compute_loss returned NoneType; it must return the loss"):
        NoLoss(make(), config(tmp_path), PAIRS).train()
    with pytest.raises(ConfigError, match=r"NoLogs.train_step returned NoneType; it must return a dict"):
        NoLogs(make(), config(tmp_path), PAIRS).train()


def test_what_a_user_has_put_in_the_place_of_a_link_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "epoch_1").mkdir()
    (tmp_path / "epoch_1" / "mine").write_text("mine")
    Trainer(make(), config(tmp_path, num_epochs=2), PAIRS).train()
    assert (tmp_path / "epoch_1" / "mine").read_text() == "mine"
    assert "epoch_1: not a link, so it is kept" in caplog.text
    assert (tmp_path / "epoch_2").is_symlink()


def test_a_card_tells_no_place_on_this_machine(tmp_path: Path) -> None:
    Trainer(make(), config(tmp_path / "first"), PAIRS).train()
    settings = {
        "init_weights_from": tmp_path / "first" / "final_epoch",
        "tensorboard": {"log_dir": str(tmp_path / "tb")},
    }
    Trainer(make(), config(tmp_path / "next", **settings), PAIRS).train()
    for card in (tmp_path / "next").rglob("README.md"):
        assert str(tmp_path) not in card.read_text()
        assert "final_epoch" in card.read_text()


def test_the_k_best_checkpoints_are_kept_besides_the_newest(tmp_path: Path) -> None:
    settings = {"num_epochs": 4, "save_top_k": 2, "max_to_keep": 1}
    Told(make(), config(tmp_path, **settings), PAIRS, PAIRS).train()
    folders = sorted(path.name for path in (tmp_path / "checkpoints").iterdir() if not path.name.startswith("."))
    assert folders == ["20", "last_checkpoint", "model_best", "model_best_10", "model_best_20"]
    assert (tmp_path / "checkpoints" / "model_best").resolve().name == "model_best_10"
    Told(make(), config(tmp_path, **settings), PAIRS, PAIRS).train()
    assert len(list((tmp_path / "checkpoints").glob("model_best_*"))) == 2, "the earlier run is moved aside"


def test_save_top_k_without_evaluation_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Trainer(make(), config(tmp_path, save_top_k=2), PAIRS)
    assert "save_top_k=2 has no effect: nothing is evaluated" in caplog.text
