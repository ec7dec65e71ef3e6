"""A setting that is changed after the trainer was built is used by the next train(), or refused: in both APIs."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn

from tests.config.training.test_checked_config import VALUES
from tests.toys import Classifier, file_config, pairs, points, quiet
from trainwright import DefaultTrainer, LazyCall, Trainer, TrainingConfig
from trainwright.base.errors import ConfigError
from trainwright.config.settings import KEYS, changed_of_key
from trainwright.inspect.find.learning_rate import use_learning_rate

DATA = pairs(24)
REFUSED = [name for name, row in TrainingConfig.rows.items() if row.changed == "build"]
USED: dict[str, Any] = {
    "num_epochs": 4,
    "max_steps": 4,
    "max_time": 1e-6,
    "max_grad_norm": 0.01,
    "clip_grad_value": 1e-3,
    "save_steps": 2,
    "model_checkpoint": {"every_n_iteration": 2},
    "max_to_keep": 1,
    "log_steps": 1,
    "limit_eval_batches": 1,
    "eval_on_start": True,
    "load_best_model_at_end": True,
    "freeze_bn": True,
    "lr_scheduling_steps": 1,
    "early_stopping": {"monitor": "epoch_loss", "patience": 0, "mode": "max"},
    "tensorboard": {"comment": "tb"},
    "logs_dir": "logs",
}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


def trained(folder: Path, changed: dict[str, Any], **settings: Any) -> tuple[Any, ...]:
    """What a training has done: its steps, weights, files, and the lines of its metrics."""
    given = {"batch_size": 8, "lr": 0.1, "num_epochs": 3, "lr_scheduler": {"name_": "StepLR", "step_size": 1}}
    trainer = Trainer(net(), quiet(folder, **{**given, **settings}), DATA, DATA)
    trainer.config.update(changed)
    trainer.train()
    files = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if "tfevents" not in p.name}
    with open(next(folder.rglob("metrics.csv"), "/dev/null"), newline="") as file:
        lines = [{k: v for k, v in row.items() if "time" not in k and "thr" not in k} for row in csv.DictReader(file)]
    weights = torch.cat([t.flatten().double() for t in trainer.model.state_dict().values()])
    return trainer.iterations_done, weights.tolist(), sorted(files), lines


@pytest.mark.parametrize("name", USED)
def test_used_by_the_next_training(name: str, tmp_path: Path) -> None:
    assert TrainingConfig.rows[name].changed == "train"
    then, late = (
        trained(tmp_path / p, c, **s) for p, c, s in (("a", {}, {name: USED[name]}), ("b", {name: USED[name]}, {}))
    )
    assert late == then
    assert late != trained(tmp_path / "c", {}) or name == "load_best_model_at_end"  # the last weights are the best here


def test_evaluations_become_due_at_other_steps(tmp_path: Path) -> None:
    changes = {"eval_strategy": "step", "eval_steps": 2}
    assert trained(tmp_path / "a", changes) == trained(tmp_path / "b", {}, **changes)
    with pytest.raises(ConfigError, match="eval_strategy: was changed from epoch to no"):
        trained(tmp_path / "c", {"eval_strategy": "no"})


def test_what_the_constructor_has_read_is_refused(tmp_path: Path) -> None:
    trainer = Trainer(net(), quiet(tmp_path, batch_size=8), DATA)
    config = trainer.config
    for name in REFUSED:
        trainer.config = config.copy_with()
        values = [value for value in VALUES.get(name, []) if config.copy_with(**{name: value}) != config]
        for value in values[-1:]:
            trainer.config.update({name: value})
            with pytest.raises(ConfigError, match=rf"TrainingConfig.{name}: was changed from .* Build another Trainer"):
                trainer.train()
    trainer.config = config
    trainer.train()


def test_all_refused_changes_are_one_message_and_secrets_are_hidden(tmp_path: Path) -> None:
    trainer = Trainer(net(), quiet(tmp_path), DATA)
    trainer.config.update({"batch_size": 4, "ema": {"decay": 0.9}, "max_time": 100})
    with pytest.raises(ConfigError) as error:
        trainer.train()
    lines = str(error.value).splitlines()
    assert [line.partition(":")[0] for line in lines] == ["TrainingConfig.batch_size", "TrainingConfig.ema"]
    trainer.config.update({"batch_size": 8, "ema": None})
    trainer.train()
    assert trainer.iterations_done > 0


def test_what_a_method_of_the_trainer_changes_is_used(tmp_path: Path) -> None:
    trainer = Trainer(net(), quiet(tmp_path, batch_size=8), DATA)
    trainer.set_optimizer(torch.optim.SGD(trainer.model.parameters(), lr=0.1))
    trainer.set_loss(nn.CrossEntropyLoss(label_smoothing=0.1))
    trainer.train()
    assert trainer.iterations_done == trainer.max_iter


def test_a_checkpoint_and_its_card_have_the_settings_of_now(tmp_path: Path) -> None:
    trainer = Trainer(net(), quiet(tmp_path, batch_size=8, num_epochs=1), DATA)
    trainer.train()
    trainer.config.update({"num_epochs": 2, "max_grad_norm": 0.5})
    trainer.train()
    for folder, num_epochs, norm in (("epoch_1", 1, "null"), ("epoch_2", 2, "0.5")):
        state = json.loads((tmp_path / folder / "trainer.json").read_text())["settings"]
        assert (state["num_epochs"], json.dumps(state["max_grad_norm"])) == (num_epochs, norm)
        card = (tmp_path / folder / "README.md").read_text()
        assert f"\nnum_epochs: {num_epochs}\n" in card
        assert f"\nmax_grad_norm: {norm}\n" in card


def cfg(folder: Path, **train: Any) -> DictConfig:
    given = {"train_iter": 4, "train_micro_batch_size": 8, "log_period": 1, **train}
    return file_config(folder, Classifier, points, LazyCall(points)(length=48, seed=1), **given)


def of_file(folder: Path, changed: dict[str, Any], **train: Any) -> tuple[Any, ...]:
    torch.manual_seed(0)
    trainer = DefaultTrainer(cfg(folder, **train))
    for key, value in changed.items():
        OmegaConf.update(trainer.cfg, key, value)
    trainer.train()
    weights = torch.cat([t.flatten() for t in trainer.model.state_dict().values()])
    results = {name: history.values() for name, history in trainer.storage.histories().items() if "time" not in name}
    return trainer.iterations_done, weights.tolist(), repr({k: v for k, v in results.items() if "throughput" not in k})


EARLY = {"monitor": "epoch_loss", "patience": 0, "mode": "max"}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("train_iter", 6),
        ("train_epoch", 4),
        ("max_time", 1e-6),
        ("eval_on_start", True),
        ("limit_eval_batches", 1),
        ("early_stopping", EARLY),
    ],
)
def test_used_by_the_next_training_of_a_config_file(key: str, value: Any, tmp_path: Path) -> None:
    late = of_file(tmp_path / "late", {f"train.{key}": value}, iter_per_epoch=1)
    assert late == of_file(tmp_path / "then", {}, **{"iter_per_epoch": 1, key: value})
    assert late != of_file(tmp_path / "without", {}, iter_per_epoch=1) or key == "train_epoch"  # which is as long


def test_early_stopping_watches_the_training_also_without_an_evaluation(tmp_path: Path) -> None:
    without_test = cfg(tmp_path, iter_per_epoch=1)
    del without_test.dataloader.test
    trainer = DefaultTrainer(without_test)
    trainer.cfg.train.early_stopping = EARLY
    trainer.train()
    assert trainer.iterations_done < 4


@pytest.mark.parametrize(
    ("changes", "iterations"),
    [
        ({"train_epoch": 2}, 4),
        ({"train_epoch": 5}, 10),
        ({"train_epoch": 0, "train_iter": 3}, 3),
        ({"train_iter": 3}, 8),
        ({"train_iter": 10}, 10),
    ],
)
def test_a_new_length_is_compared_with_the_length_that_was_given(
    changes: dict[str, int], iterations: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = DefaultTrainer(cfg(tmp_path, train_iter=0, train_epoch=4, log_period=0.5))
    trainer.cfg.train.update(changes)
    with caplog.at_level("INFO", "trainwright"):
        trainer.train()
    assert (trainer.iterations_done, trainer.cfg.train.train_iter) == (iterations, iterations)
    assert ("the larger counts" in caplog.text) == ("train_iter" in changes and "train_epoch" not in changes)


def test_periods_that_are_shares_follow_a_new_length(tmp_path: Path) -> None:
    def rows(folder: str, late: dict[str, int], **train: Any) -> list[Any]:
        given = cfg(tmp_path / folder, log_period=0.25, **train)
        given.train.evaluation.eval_period = given.train.checkpointer.period = 0.5
        trainer = DefaultTrainer(given)
        trainer.cfg.train.update(late)
        trainer.train()
        lines = [json.loads(line) for line in (tmp_path / folder / "metrics.json").read_text().splitlines()]
        saved = sorted(path.name for path in (tmp_path / folder).glob("model_*"))
        return [saved, [(line["iteration"], [name for name in line if "Acc" in name]) for line in lines]]

    assert rows("late", {"train_iter": 12}) == rows("then", {}, train_iter=12)


@pytest.mark.parametrize("has_trained", [False, True])
def test_a_late_setting_is_recorded_and_saved_as_one_that_was_given(
    has_trained: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = DefaultTrainer(cfg(tmp_path))
    if has_trained:
        trainer.train()
        trainer.cfg.train.train_iter = 6
    trainer.cfg.train.freeze_bn = True
    with caplog.at_level("INFO", "trainwright"):
        trainer.train()
    assert "train.freeze_bn=True" in caplog.text
    assert trainer.run.recorded_settings()["train.freeze_bn"] is True
    newest = tmp_path / (tmp_path / "last_checkpoint").read_text()
    assert '"train.freeze_bn":true' in (newest / "trainer.json").read_text()
    assert OmegaConf.load(tmp_path / "config.yaml").train.freeze_bn is True


def test_a_rate_that_was_found_is_recorded_and_saved(tmp_path: Path) -> None:
    trainer = DefaultTrainer(cfg(tmp_path))
    use_learning_rate(trainer.run, 0.033)
    assert (trainer.run.spec.learning_rate, trainer.run.recorded_settings()["optim.lr"]) == (0.033, 0.033)
    trainer.train()
    assert OmegaConf.load(tmp_path / "config.yaml").optim.lr == 0.033


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("train.train_micro_batch_size", 2),
        ("train.evaluation.eval_period", 3),
        ("train.ema", {"decay": 0.9}),
        ("train.scheduler.alpha", 0.5),
        ("optim.lr", 7.0),
        ("optim.params.clip_grad_max_norm", 0.1),
        ("dataloader.train.num_workers", 1),
        ("graph.enabled", True),
    ],
)
def test_what_a_config_file_has_built_is_refused(key: str, value: Any, tmp_path: Path) -> None:
    trainer = DefaultTrainer(cfg(tmp_path))
    before = OmegaConf.select(trainer.cfg, key)
    OmegaConf.update(trainer.cfg, key, value)
    with pytest.raises(ConfigError, match=rf"^{key}.* was changed .* Build another DefaultTrainer"):
        trainer.train()
    assert trainer.iterations_done == 0
    OmegaConf.update(trainer.cfg, key, before)
    trainer.train()


def test_a_wrong_value_is_refused_before_the_first_step(tmp_path: Path) -> None:
    trainer = DefaultTrainer(cfg(tmp_path))
    trainer.cfg.train.max_time = "soon"
    with pytest.raises(ConfigError, match=r"train.max_time.*got 'soon'"):
        trainer.train()


def test_keys_at_the_places_of_settings_are_changed_as_these_or_refused() -> None:
    for row in TrainingConfig.rows.values():
        if changed_of_key(row.place) == "train":
            assert row.changed == "train"
    assert {path for path, key in KEYS.items() if key.changed == "train"} >= {"train.train_iter", "train.max_time"}


@pytest.mark.parametrize("is_copied", [False, True])
def test_the_configuration_that_was_passed_may_be_changed_as_well(is_copied: bool, tmp_path: Path) -> None:
    config = quiet(tmp_path, batch_size=8, num_epochs=1)
    more: dict[str, Any] = {"loss": nn.CrossEntropyLoss()} if is_copied else {}  # the trainer notes its name in a copy
    trainer = Trainer(net(), config, DATA, **more)
    assert (trainer.config is config) is not is_copied
    config.num_epochs = 3
    trainer.train()
    assert trainer.state.epoch == trainer.config.num_epochs == 3
    config.seed = 5
    with pytest.raises(ConfigError, match="seed: was changed from"):
        trainer.train()


def test_a_folder_of_logs_that_is_set_late_belongs_to_the_run(tmp_path: Path) -> None:
    trainer = Trainer(net(), quiet(tmp_path, batch_size=8, num_epochs=1), DATA)
    trainer.config.logs_dir = "logs"
    trainer.train()
    again = Trainer(net(), quiet(tmp_path, batch_size=8, num_epochs=1, logs_dir="logs"), DATA)
    again.train()
    assert (tmp_path / "logs" / "metrics.csv").exists()


def test_lines_of_epochs_follow_the_settings_of_each_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def lines() -> list[str]:
        found = [message for message in caplog.messages if message.startswith("Epoch ")]
        caplog.clear()
        return [line.partition("  ")[0] for line in found]

    caplog.set_level("INFO", "trainwright")
    trainer = Trainer(net(), TrainingConfig(output_dir=tmp_path, batch_size=8, num_epochs=1, log_steps=1), DATA)
    trainer.train()
    assert lines() == []  # of one epoch
    trainer.config.num_epochs = 3
    trainer.train()
    assert lines() == ["Epoch 2/3", "Epoch 3/3"]
    trainer.config.update(num_epochs=5, progress_bar=False)
    trainer.train()
    assert lines() == []


def test_the_best_weights_that_are_requested_late_need_evaluations(tmp_path: Path) -> None:
    trainer = Trainer(net(), quiet(tmp_path, batch_size=8, num_epochs=1), DATA)
    trainer.config.load_best_model_at_end = True
    with pytest.raises(ConfigError, match="load_best_model_at_end: got True, but nothing is evaluated"):
        trainer.train()
