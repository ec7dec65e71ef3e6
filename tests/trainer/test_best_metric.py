"""What chooses the best checkpoint, and what stops a run early."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.ranks import on_ranks
from tests.toys import Classifier, Results, Samples, points, quiet, trained
from tests.toys import file_config as config_of
from tests.trainer.conftest import INPUTS as STOPPING_INPUTS
from tests.trainer.conftest import PAIRS, Scripted, config, events_in, make
from trainwright import DefaultTrainer, LazyConfig, Trainer, TrainerConfig, TrainingConfig
from trainwright.base.dist import get_rank
from trainwright.base.errors import ConfigError
from trainwright.config import MetricConfig
from trainwright.engine import default_setup
from trainwright.evaluation import RegEvaluator
from trainwright.hooks import BestCheckpointer, Callback, EarlyStoppingCallback, HookBase

INPUTS = torch.randn(32, 4, generator=torch.Generator().manual_seed(5))
LABELS = (INPUTS[:, 0] > 0).long()
DATA = TensorDataset(INPUTS, LABELS)


def values(predictions: Tensor, labels: Tensor) -> dict[str, float]:
    """Falls from epoch to epoch."""
    return {"nll": nn.functional.cross_entropy(predictions, labels).item()}


def run(folder: Path, handler: Any = values, **settings: Any) -> Trainer:
    torch.manual_seed(0)
    given = {"metric_for_best_model": "nll", "num_epochs": 3, "lr": 0.05, "metrics": None}
    return Trainer(nn.Linear(4, 2), quiet(folder, **{**given, **settings}), DATA, DATA, metrics_handler=handler)


def best_step(folder: Path) -> int:
    extra = json.loads((folder / "checkpoints" / "model_best" / "extra.json").read_text())
    return int(extra["iteration"]) + 1


@pytest.mark.parametrize(
    ("settings", "step"),
    [
        ({"greater_is_better": False}, 12),
        ({"greater_is_better": True}, 4),
        ({"metrics": [MetricConfig("nll", objective="minimize")]}, 12),
    ],
)
def test_the_better_direction_is_the_users(
    settings: dict[str, Any], step: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path, **settings).train()
    assert best_step(tmp_path) == step
    assert f"Best eval_nll so far ({'lower' if step == 12 else 'higher'} is better)" in caplog.text


@pytest.mark.parametrize("name", ["F1Score", "f1score", "eval_F1_Score"])
def test_a_metric_may_be_named_as_in_metrics(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture, read_rows: Any
) -> None:
    trainer = run(tmp_path, None, metrics=["Accuracy", "F1Score"], metric_for_best_model=name)
    trainer.train()
    assert "Best eval_f1_score so far (higher is better)" in caplog.text
    found = {row["iteration"]: row["eval_f1_score"] for row in read_rows(tmp_path) if "eval_f1_score" in row}
    steps = {at if at == 12 else at + 1: value for at, value in found.items()}
    assert best_step(tmp_path) == max(steps, key=lambda step: (steps[step], -step))


def test_an_unknown_direction_is_an_error_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"metric_for_best_model: got 'nll'.*greater_is_better=True or"):
        run(tmp_path)
    run(tmp_path, save_enabled=False)  # nothing is chosen by it
    with pytest.raises(ConfigError, match=r"greater_is_better: got True, but the MetricConfig of 'nll'"):
        run(tmp_path, greater_is_better=True, metrics=[MetricConfig("nll", objective="minimize")])


@pytest.mark.parametrize(
    ("settings", "warning"),
    [
        ({"greater_is_better": True}, "greater_is_better: a higher loss counts as better"),
        ({"early_stopping": {"monitor": "eval_accuracy", "mode": "min"}}, "early_stopping: a lower accuracy counts"),
        ({"greater_is_better": False, "early_stopping": {"monitor": "eval_accuracy", "mode": "max"}}, None),
    ],
)
def test_a_direction_that_a_metric_does_not_have_is_a_warning(
    settings: dict[str, Any], warning: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path, None, metrics=["Accuracy"], metric_for_best_model="loss", num_epochs=1, **settings).train()
    found = [r.getMessage() for r in caplog.records if "counts as better" in r.getMessage()]
    assert len(found) == (warning is not None)
    assert warning is None or warning in found[0]


def test_early_stopping_and_schedules_go_the_same_way(tmp_path: Path) -> None:
    schedule = {"lr_scheduler": "ReduceLROnPlateau", "lr_scheduler_type": None}
    for monitor in ({}, {"monitor": "eval_nll", "mode": "auto"}, {"monitor": "eval_epoch_metric", "mode": "auto"}):
        trainer = run(
            tmp_path, greater_is_better=False, num_epochs=1, early_stopping={"patience": 2, **monitor}, **schedule
        )
        assert trainer.lr_scheduler.mode == "min"  # type: ignore[union-attr]
        if monitor.get("monitor") == "eval_epoch_metric":
            continue  # a function's first metric has no known name before the call
        trainer.train()
        (stopping,) = [callback for callback in trainer.callbacks if isinstance(callback, EarlyStoppingCallback)]
        assert stopping.mode == "min"


def test_a_metric_that_nothing_measures_is_refused_at_the_start(tmp_path: Path) -> None:
    settings = {"metrics": ["Accuracy"], "handler": None, "metric_for_best_model": "acuracy"}
    with pytest.raises(ConfigError, match=r"got 'acuracy'.*'accuracy'"):
        run(tmp_path, **settings)

    class Own(Trainer):
        def evaluate(self, *arguments: Any) -> dict[str, Any]:
            return {"acuracy": 1.0}

    config = TrainingConfig(output_dir=tmp_path, metric_for_best_model="acuracy", greater_is_better=True)
    Own(nn.Linear(4, 2), config, DATA, DATA)


def falling() -> Results:
    return Results(**{"nll": [1.0], "1_PPL": [2.0]})


def samples() -> Samples:
    return Samples(inputs=INPUTS, labels=LABELS.tolist())


def file_config(folder: Path, **evaluation: Any) -> DictConfig:
    settings = {"train_iter": 2, "train_micro_batch_size": 8, "evaluation": evaluation}
    return config_of(folder, Classifier, samples, samples, **settings)


def test_an_eval_metric_without_a_mode_is_judged(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"eval_metric: got 'nll'.*eval_mode='max' or 'min'"):
        DefaultTrainer(file_config(tmp_path, evaluator=falling(), eval_metric="nll"))
    with pytest.raises(ConfigError, match=r"eval_metric: got 'nll'"):
        default_setup(file_config(tmp_path, evaluator=falling(), eval_metric="nll"))
    named = DefaultTrainer(file_config(tmp_path / "a", evaluator=falling(), eval_metric="1_PPL"))
    assert named.cfg.train.evaluation.eval_mode == "min"
    given = DefaultTrainer(file_config(tmp_path / "b", evaluator=falling(), eval_metric="1_PPL", eval_mode="max"))
    assert given.cfg.train.evaluation.eval_mode == "max"
    assert DefaultTrainer(file_config(tmp_path / "c")).cfg.train.evaluation.eval_mode == "max"


@pytest.mark.parametrize(("metric", "other", "mode"), [("Acc@1", "loss", "min"), ("loss", "Acc@1", "max")])
def test_a_mode_that_was_judged_follows_another_metric_of_a_saved_configuration(
    metric: str, other: str, mode: str, tmp_path: Path
) -> None:
    trainer = DefaultTrainer(file_config(tmp_path, eval_metric=metric))
    assert not trainer.run.spec.is_set("greater_is_better")
    saved = LazyConfig.load(tmp_path / "config.yaml")
    assert DefaultTrainer(saved).cfg.train.evaluation.eval_mode == ("max" if mode == "min" else "min")
    text = (tmp_path / "config.yaml").read_text()
    (tmp_path / "edited.yaml").write_text(text.replace(f"eval_metric: {metric}", f"eval_metric: {other}"))
    edited = LazyConfig.load(tmp_path / "edited.yaml")
    saved.train.evaluation.eval_metric = other
    for cfg in (saved, edited):
        assert DefaultTrainer(cfg).cfg.train.evaluation.eval_mode == mode
    saved.train.evaluation.eval_mode = "max" if mode == "min" else "min"
    assert DefaultTrainer(saved).cfg.train.evaluation.eval_mode != mode


def test_an_eval_metric_that_no_evaluator_gives_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"eval_metric: got 'Acc@2'.*does not compute.*Acc@"):
        DefaultTrainer(file_config(tmp_path, eval_metric="Acc@2")).train()
    with pytest.raises(
        ConfigError, match=r"got 'accuracy', which the evaluation does not compute; its results are loss, .*pear"
    ):
        DefaultTrainer(file_config(tmp_path, evaluator=RegEvaluator(), eval_metric="accuracy")).train()
    DefaultTrainer(file_config(tmp_path, evaluator=RegEvaluator()))  # the default names the metric of another one


LOSSES = [4.0, 4.0, 1.0, 2.0, 2.0, 2.0, 2.5, 2.5, 2.5]  # of three epochs, whose means are 3, 2 and 2.5


class Loses(nn.Module):
    """Losses that the test gives, one for each batch of the training."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        loss = torch.tensor(LOSSES)[self.calls.clone()] if self.training else torch.tensor(1.0)
        self.calls += self.training
        return {"loss": loss + 0 * self.weight}


def zeros() -> Samples:
    return Samples(x=torch.zeros(6, 2))


@pytest.mark.parametrize("evaluates", [True, False])
@pytest.mark.parametrize("stop", [None, 4])
@pytest.mark.parametrize("api", ["Python", "config file"])
def test_of_the_training_loss_the_mean_of_the_epoch_counts_and_not_the_last_batch(
    api: str, stop: int | None, evaluates: bool, tmp_path: Path
) -> None:
    test = zeros if evaluates else None

    def build(*, resume: bool = False) -> Any:
        if api == "Python":
            settings = {"num_epochs": 3, "batch_size": 2, "metrics": None, "metric_for_best_model": "train.loss"}
            saves = {"save_steps": 1, "resume_from_checkpoint": resume}
            return Trainer(Loses(), quiet(tmp_path, **settings, **saves), zeros(), test and test())
        cfg = config_of(tmp_path, Loses, zeros, test, train_epoch=3, train_micro_batch_size=2, resume=resume)
        cfg.train.evaluation.update({"evaluator": [], "eval_metric": "train.loss", "eval_after_n_epoch": 1})
        cfg.train.checkpointer.period = 1
        return DefaultTrainer(cfg)

    if stop is not None:
        trained(build(), stop=stop)
    trainer = build(resume=stop is not None)
    trainer.train()
    extra = json.loads((Path(trainer.best_checkpoint) / "extra.json").read_text())
    assert (extra["iteration"] + 1, extra["total_loss"]) == (6, 2.0)


class LogsTrainLoss(Callback):
    def on_train_batch_end(self, batch: Any, logs: Any) -> None:
        self.trainer.log({"train_loss": 1.0})


@pytest.mark.parametrize("best", [{"load_best_model_at_end": True}, {}])
def test_a_result_of_the_training_is_no_result_of_the_evaluation(best: dict[str, bool], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"got 'train_loss', which .*Did you mean 'train\.loss'"):
        run(tmp_path, None, metric_for_best_model="train_loss", **best).train()
    assert not (tmp_path / "checkpoints").exists()
    one = run(tmp_path, None, metric_for_best_model="train_loss", **best)
    one.add_callback(LogsTrainLoss())
    with pytest.raises(ConfigError, match=r"A value of this name that your code logs is 'train\.train_loss'"):
        one.train()
    assert not (tmp_path / "checkpoints").exists()
    run(tmp_path, None, metric_for_best_model="train.loss", num_epochs=1, **best).train()
    data = {"train_part": DATA, "train": DATA}  # names of data sets, whose results are called so
    for name in ("train_part_loss", "train_loss"):
        one = Trainer(nn.Linear(4, 2), quiet(tmp_path, num_epochs=1, metric_for_best_model=name, **best), DATA, data)
        one.train()


def test_a_hook_may_end_a_run_of_a_config_file(tmp_path: Path, read_rows: Any) -> None:
    class Stop(HookBase):
        def after_step(self) -> None:
            value, at = self.trainer.storage.latest().get("1_PPL", (0.0, -1))
            if (value, at) == (2.0, 1):  # the evaluation after the second iteration
                self.trainer.max_iter = self.trainer.iter + 1

    class Stopped(DefaultTrainer):
        def build_hooks(self) -> list[HookBase]:
            hooks = super().build_hooks()
            hooks.insert(-1, Stop())  # behind the evaluation
            return hooks

    cfg = file_config(tmp_path, evaluator=falling(), eval_metric="1_PPL", eval_period=2)
    cfg.train.train_iter = 8
    results = Stopped(cfg).train()
    assert results["1_PPL"] == 2.0
    assert read_rows(tmp_path)[-1]["iteration"] == 1  # the final evaluation repeats that of the last iteration
    assert (tmp_path / "model_final").exists()


@pytest.mark.parametrize("monitor", ["eval_accuracy", "loss", "eval_epoch_metric"])
def test_early_stopping_may_watch_any_metric(monitor: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stopping = {"monitor": monitor, "mode": "max", "patience": 1}
    run(tmp_path, None, metrics=["Accuracy"], metric_for_best_model="loss", early_stopping=stopping).train()
    assert "which neither the evaluation nor" not in caplog.text


@pytest.mark.parametrize("monitor", ["val_acc", "eval_acuracy"])
def test_early_stopping_by_what_nothing_measures_is_refused(monitor: str, tmp_path: Path) -> None:
    stopping = {"monitor": monitor, "mode": "max"}
    trainer = run(tmp_path, None, metrics=["Accuracy"], metric_for_best_model="loss", early_stopping=stopping)
    with pytest.raises(ConfigError, match=rf"'{monitor}'.*'eval_accuracy'"):
        trainer.train()


@pytest.mark.parametrize("stopping", [{"monitor": "eval_loss"}, {"patience": 2}])
def test_early_stopping_without_evaluations_is_named(
    stopping: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Trainer(nn.Linear(4, 2), quiet(tmp_path, early_stopping=stopping, num_epochs=1), DATA).train()
    assert "nothing is evaluated" in caplog.text
    caplog.clear()
    for monitor, is_named in (("eval_loss", True), ("epoch_loss", False)):
        callback = EarlyStoppingCallback(None, monitor, patience=1, mode="min")
        Trainer(nn.Linear(4, 2), quiet(tmp_path, num_epochs=1), DATA, callbacks=[callback]).train()
        assert caplog.text.count("EarlyStoppingCallback: watches eval_loss, but nothing is evaluated") == is_named
        caplog.clear()


class LossAlone(Scripted):
    def evaluate(self, dataset: Any = None) -> dict[str, Any]:  # type: ignore[override]
        return {"loss": super().evaluate()["loss"]}


@pytest.mark.parametrize(
    ("kind", "monitor"),
    [
        (Scripted, ("eval_epoch_loss", "min")),
        (Scripted, ("score", "max")),  # also by its plain name
        (LossAlone, ("eval_epoch_metric", "max")),  # by the loss where there is no metric
    ],
)
def test_early_stopping_stops_stays_stopped_and_goes_on_with_more_patience(
    kind: type[Scripted], monitor: tuple[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "trainwright")

    def run(patience: int, **settings: Any) -> Scripted:
        stopping = {"monitor": monitor[0], "patience": patience, "mode": monitor[1]}
        trainer = kind(make(), config(tmp_path, num_epochs=4, early_stopping=stopping, **settings), PAIRS, PAIRS)
        trainer.train()
        return trainer

    assert run(1).epoch == 3  # 2.0 is not better than 1.0
    assert os.readlink(tmp_path / "final_epoch") == "checkpoints/15"
    assert run(1, resume_from_checkpoint=True).epoch == 3
    assert "Nothing to train: a callback stopped the run" in caplog.text
    assert run(2, resume_from_checkpoint=True).epoch == 4


def test_the_default_early_stopping_is_no_trouble_where_there_is_no_metric(tmp_path: Path) -> None:
    data = TensorDataset(STOPPING_INPUTS, STOPPING_INPUTS[:, :3])
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
    assert all(
        fact in start
        for fact in ("is on: it ends the run after 4 evaluations", "lower eval_loss", "early_stopping=None")
    )
    caplog.clear()
    assert epochs("accuracy", metric_for_best_model="accuracy", early_stopping={"patience": 2}) == 3
    (_, end) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("Early stopping")]
    for part in ("eval_accuracy was no better", "patience=2", "epoch 3", "early_stopping=None turns it off"):
        assert part in end
    assert epochs("named", early_stopping={"monitor": "eval_accuracy", "mode": "max"}) == 5


def test_a_callback_of_the_users_stands_in_for_the_configurations(tmp_path: Path) -> None:
    settings = config(tmp_path, num_epochs=4, early_stopping={"monitor": "eval_epoch_loss", "patience": 1})
    trainer = Scripted(make(), settings, PAIRS, PAIRS)
    trainer.add_callback(EarlyStoppingCallback(trainer.trainercontrol, "eval_epoch_loss", patience=9, mode="min"))
    trainer.train()
    assert trainer.epoch == 4
    assert [type(callback).__name__ for callback in trainer.callbacks] == ["EarlyStoppingCallback"]


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


def test_a_part_of_an_epoch_is_not_compared_with_whole_ones(tmp_path: Path) -> None:
    def build(steps: int, *, resume: bool = False) -> Trainer:
        settings = {"max_steps": steps, "batch_size": 2, "metrics": None, "metric_for_best_model": "train.loss"}
        return Trainer(Loses(), quiet(tmp_path, **settings, resume_from_checkpoint=resume), zeros())

    first = build(4)  # the loss of the fourth update is 2.0, the mean of the first epoch 3.0
    first.train()
    assert best_step(tmp_path) == 3
    longer = build(6, resume=True)
    longer.train()
    assert best_step(tmp_path) == 6
    extra = json.loads((tmp_path / "checkpoints" / "model_best" / "extra.json").read_text())
    assert extra["total_loss"] == 2.0  # of all three updates of the second epoch


def test_without_evaluations_only_metrics_of_the_training_choose(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"num_epochs": 2, "batch_size": 2, "metrics": None, "metric_for_best_model": "train.loss"}
    stopping = {"early_stopping": {"patience": 5}, "save_best": {"eval_loss": "min"}}
    trainer = Trainer(Loses(), quiet(tmp_path, **settings, **stopping), zeros())
    trainer.train()
    assert best_step(tmp_path) == 6
    assert "save_best={'eval_loss': 'min'} has no effect: nothing is evaluated" in caplog.text
    assert "watches the result of an evaluation" not in caplog.text
    assert "did not compute" not in caplog.text


def test_a_metric_of_the_training_is_not_the_result_of_that_name(tmp_path: Path) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(64, 4)
    labels = (inputs[:, 0] > 0).long()
    settings = {"metric_for_best_model": "train.accuracy", "num_epochs": 3, "lr": 0.05, "metrics": ["accuracy"]}
    plateau = {"lr_scheduler": {"name_": "ReduceLROnPlateau", "patience": 9}, "loss": "CrossEntropyLoss"}
    data, other = TensorDataset(inputs, labels), TensorDataset(inputs, 1 - labels)
    trainer = Trainer(nn.Linear(4, 2), quiet(tmp_path, **settings, **plateau), data, other)
    trainer.train()
    (hook,) = [one for one in trainer.hooks if isinstance(one, BestCheckpointer)]
    of_training = trainer.storage.history("accuracy").latest()  # it rises
    assert trainer.storage.history("eval_accuracy").latest() < 0.5 < of_training
    assert hook.best == trainer.lr_scheduler.best == of_training


class Drifts(nn.Module):
    """Its loss, the parameter, falls by its gradient for an epoch of three updates, and rises in the next."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.tensor(10.0))
        self.calls = 0

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        return {"loss": self.place * (1 if self.calls <= 3 else -1) + (0 if self.calls <= 3 else 30)}


def test_the_best_weights_by_the_training_loss_are_loaded_without_evaluations(tmp_path: Path) -> None:
    settings = {"num_epochs": 2, "batch_size": 2, "metrics": None, "metric_for_best_model": "train.loss"}
    optimizer = {"optimizer": "SGD", "lr": 1.0, "load_best_model_at_end": True, "lr_scheduler_type": "constant"}
    model = Drifts()
    Trainer(model, quiet(tmp_path, **settings, **optimizer), zeros()).train()
    assert best_step(tmp_path) == 3
    assert model.place.item() == 7.0  # 10.0 after the second epoch


class ScoreOfRank(HookBase):
    """A value that each process puts for itself: it rises on the first, and falls on the second."""

    def after_step(self) -> None:
        sign = 1 if get_rank() == 0 else -1
        self.trainer.storage.put_scalar("score", float(sign * self.trainer.iter), smoothing_hint=False)


def best_on_rank(folder: str) -> tuple[float | None, int | None]:
    settings = {"num_epochs": 3, "batch_size": 2, "metrics": None}
    best = {"metric_for_best_model": "train.score", "greater_is_better": True}
    trainer = Trainer(Classifier(), quiet(Path(folder), **settings, **best), points())
    trainer.register_hooks([ScoreOfRank()])
    trainer.train()
    (hook,) = [one for one in trainer.hooks if isinstance(one, BestCheckpointer)]
    return hook.best, hook.best_iter


def test_processes_decide_by_one_value_and_save_together(tmp_path: Path) -> None:
    first, second = on_ranks(best_on_rank, str(tmp_path))
    assert first == second
    assert first[0] == first[1] > 0  # of the last iteration, by the first process
