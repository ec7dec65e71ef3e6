"""Evaluations of several data sets: results by name, the best checkpoint, early stopping and resume."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.toys import layers, pairs, quiet
from tests.trainer.test_stops import by_config, columns
from trainwright import LazyCall, Trainer, TrainingConfig
from trainwright.base.errors import ConfigError, ConfigTypeError
from trainwright.data import build_image_test_loader
from trainwright.engine import DefaultTrainer
from trainwright.hooks import Callback

CLEAN = pairs(40)
NOISY = TensorDataset(CLEAN.tensors[0] + 1, CLEAN.tensors[1])
SETS = {"clean": CLEAN, "noisy": NOISY}


def build(folder: Path, data: Any = SETS, callbacks: Any = (), **settings: Any) -> Trainer:
    torch.manual_seed(0)
    given = {"num_epochs": 3, "batch_size": 8, "lr": 0.01, "log_steps": 1, "resume_from_checkpoint": True}
    return Trainer(layers((6, 16, 3)), quiet(folder, **{**given, **settings}), CLEAN, data, callbacks=callbacks)


class Logs(Callback):
    def on_eval_end(self, logs: Any) -> None:
        self.seen = {name: logs[name] for name in logs if name.startswith("eval_")}


def test_results_are_those_of_each_data_set(tmp_path: Path, read_rows: Any) -> None:
    logs = Logs()
    trainer = build(tmp_path, callbacks=[logs])
    results = trainer.train()
    assert list(results) == ["clean/loss", "clean/accuracy", "noisy/loss", "noisy/accuracy"]
    alone = {name: trainer.evaluate(data) for name, data in SETS.items()}
    assert results == {f"{name}/{key}": value for name, found in alone.items() for key, value in found.items()}
    assert trainer.evaluate() == trainer.evaluate(SETS) == results
    assert read_rows(tmp_path)[-1]["eval_noisy/accuracy"] == results["noisy/accuracy"]
    assert logs.seen["eval_noisy/loss"] == results["noisy/loss"]
    assert logs.seen["eval_epoch_loss"] == results["clean/loss"]
    assert logs.seen["eval_epoch_metric"] == results["clean/accuracy"]
    assert trainer.evaluate(trainer.model, {})["eval_epoch_loss"] == results["clean/loss"]


def test_a_name_may_have_blanks_dots_and_slashes(tmp_path: Path, read_rows: Any) -> None:
    data = {"val set": CLEAN, "glue/m.x": NOISY}
    results = build(tmp_path, data, num_epochs=1, metric_for_best_model="glue/m.x.loss").train()
    assert list(results) == ["val set/loss", "val set/accuracy", "glue/m.x/loss", "glue/m.x/accuracy"]
    assert read_rows(tmp_path)[-1]["eval_glue/m.x/loss"] == results["glue/m.x/loss"]


def test_loaders_by_name_are_evaluated_too(tmp_path: Path) -> None:
    one = build(tmp_path / "sets")
    given = {name: DataLoader(data, 8) for name, data in SETS.items()}
    other = Trainer(one.model, TrainingConfig(output_dir=tmp_path / "l"), CLEAN, eval_dataloader=given)
    assert other.evaluate() == pytest.approx(one.evaluate())


@pytest.mark.parametrize(
    "name", ["noisy.accuracy", "noisy/accuracy", "eval_noisy_accuracy", "evaluation.noisy.accuracy"]
)
def test_the_best_checkpoint_is_chosen_by_one_of_them(name: str, tmp_path: Path, read_rows: Any) -> None:
    trainer = build(tmp_path, metric_for_best_model=name, load_best_model_at_end=True)
    trainer.train()
    values = [row["eval_noisy/accuracy"] for row in read_rows(tmp_path) if "eval_noisy/accuracy" in row]
    assert trainer.evaluate()["noisy/accuracy"] == max(values)


def test_a_metric_without_a_data_set_is_of_the_first(tmp_path: Path) -> None:
    trainer = build(tmp_path, metric_for_best_model="accuracy")
    trainer.train()
    best = next(hook for hook in trainer._hooks if hasattr(hook, "best_iter"))
    assert best.state_dict()["metric"] == "eval_clean/accuracy"


@pytest.mark.parametrize("monitor", ["noisy.loss", "eval_noisy/loss", "eval_noisy_loss"])
def test_early_stopping_watches_one_of_them(monitor: str, tmp_path: Path) -> None:
    stopping = {"monitor": monitor, "patience": 1, "min_delta": 100.0}
    trainer = build(tmp_path, num_epochs=6, early_stopping=stopping)
    trainer.train()
    assert trainer.epoch == 2


def test_a_resume_in_the_middle_is_exact(tmp_path: Path) -> None:
    class Killed(Callback):
        def on_eval_batch_end(self, batch: Any, logs: Any) -> None:
            if logs["eval_global_step"] == 17:  # in the second set of the second evaluation
                raise KeyboardInterrupt

    whole = build(tmp_path / "whole", metric_for_best_model="noisy.loss")
    whole.train()
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path / "run", metric_for_best_model="noisy.loss", callbacks=[Killed()]).train()
    resumed = build(tmp_path / "run", metric_for_best_model="noisy.loss")
    assert resumed.train() == whole.last_eval_results
    assert all(torch.equal(a, b) for a, b in zip(resumed.model.parameters(), whole.model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        ({}, ConfigError, "eval_dataset: got a dict without entries"),
        ({"a\nb": CLEAN}, ConfigError, r"eval_dataset: got a dict with the names \['a.*b'\]"),
        ({"a": DataLoader(CLEAN)}, ConfigTypeError, r"eval_dataset\['a'\]: got DataLoader.*eval_dataloader="),
        ({"a": None}, ConfigTypeError, r"eval_dataset\['a'\]: got NoneType"),
    ],
)
def test_wrong_dicts_are_refused(data: Any, error: type[Exception], message: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=message):
        build(tmp_path, data)


def test_a_wrong_metric_names_the_right_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"noisy.acuracy.*Did you mean 'noisy.accuracy'"):
        build(tmp_path, metric_for_best_model="noisy.acuracy")


@pytest.mark.parametrize(
    ("names", "metric"), [(("clean", "noisy"), "noisy/Acc@1"), (("noisy",), "noisy/Acc@1"), (("noisy",), "Acc@1")]
)
def test_config_files_name_their_loaders(tmp_path: Path, read_rows: Any, names: Any, metric: str) -> None:
    cfg = by_config(tmp_path / "x").cfg
    cfg.train.output_dir = str(tmp_path / "run")
    test = LazyCall(build_image_test_loader)(dataset=LazyCall(columns)(), num_workers=0)
    cfg.dataloader.test = dict.fromkeys(names, test)
    cfg.train.evaluation.eval_metric = metric
    results = DefaultTrainer(cfg).train()
    assert set(results) == set(names)
    assert read_rows(tmp_path / "run")[-1]["noisy/Acc@1"] == results["noisy"]["Acc@1"]
    assert (tmp_path / "run" / "model_best").exists()
