"""Limits of a run, and at which steps something is due."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

from tests.toys import Stream, layers, pairs, quiet
from tests.trainer import contracts
from tests.trainer.conftest import PAIRS, config, make
from trainwright import Trainer, TrainingConfig
from trainwright.base.errors import ConfigError, ConfigTypeError
from trainwright.data import EpochSampler
from trainwright.hooks import Callback
from trainwright.optim import WarmupMultiStepLR

DATA = pairs()
INPUTS, LABELS = DATA.tensors


class Batches(Callback):
    def __init__(self) -> None:
        self.train: list[Tensor] = []
        self.evaluated: list[int] = []

    def on_train_batch_end(self, batch: Any, logs: Any) -> None:
        self.train.append(batch[0].clone())

    def on_eval_begin(self, logs: Any) -> None:
        self.evaluated.append(0)

    def on_eval_batch_end(self, batch: Any, logs: Any) -> None:
        self.evaluated[-1] += 1


def run(folder: Path, data: Any = DATA, eval_data: Any = DATA, *, loader: Any = None, **settings: Any) -> Any:
    torch.manual_seed(0)
    given = {"num_epochs": 3, "batch_size": 8, "lr": 0.1, "optimizer": "SGD", "log_steps": None}
    seen = Batches()
    trainer = Trainer(
        layers((6, 16, 3)), quiet(folder, model_checkpoint=None, **{**given, **settings}), data, eval_data,
        train_dataloader=loader, callbacks=[seen],
    )  # fmt: skip
    trainer.train()
    return trainer, seen


def by_hand(batches: list[Tensor]) -> list[Tensor]:
    torch.manual_seed(0)
    model = layers((6, 16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for numbers in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(INPUTS[numbers]), LABELS[numbers]).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def same(trainer: Trainer, weights: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(trainer.model.parameters(), weights, strict=True))


@pytest.mark.parametrize(("limit", "steps"), [(2, 2), (0.5, 3), (1.0, 6), (100, 6), (0.01, 1)])
def test_each_epoch_has_the_first_batches_of_its_own_order(tmp_path: Path, limit: float, steps: int) -> None:
    trainer, _ = run(tmp_path, limit_train_batches=limit)
    sampler = EpochSampler(range(50), 8, shuffle=True, drop_last=True, seed=42)
    order = list(islice(sampler, 18))
    assert same(trainer, by_hand([torch.tensor(order[6 * e + i]) for e in range(3) for i in range(steps)]))
    assert (trainer.num_batches, trainer.total_steps, trainer.epoch) == (steps, 3 * steps, 3)


@pytest.mark.parametrize("settings", [{"limit_train_batches": 0.5}, {"overfit_batches": 2}])
def test_a_limited_run_resumes_exactly(tmp_path: Path, settings: dict[str, Any]) -> None:
    whole, _ = run(tmp_path / "whole", **settings)
    run(tmp_path / "run", **settings, max_steps=4)
    resumed, _ = run(tmp_path / "run", **settings, resume_from_checkpoint=True)
    assert resumed.state.global_step == whole.state.global_step
    assert same(resumed, [p.detach() for p in whole.model.parameters()])


def test_a_passed_loader_and_a_stream_are_limited_too(tmp_path: Path) -> None:

    stream = Stream(lambda: zip(INPUTS, LABELS, strict=True))
    expected = by_hand([torch.arange(8 * i, 8 * i + 8) for _ in range(3) for i in range(2)])
    assert same(run(tmp_path / "loader", None, loader=DataLoader(DATA, 8), limit_train_batches=2)[0], expected)
    assert same(run(tmp_path / "share", None, loader=DataLoader(DATA, 8), limit_train_batches=0.3)[0], expected)
    on = by_hand([torch.arange(8 * i, 8 * i + 8) for i in range(6)])  # an epoch is the next batches of a stream
    assert same(run(tmp_path / "stream", stream, limit_train_batches=2)[0], on)
    with pytest.raises(ConfigTypeError, match=r"train_dataset: .*Stream .*no length.*TrainingConfig.max_steps"):
        run(tmp_path / "wrong", stream, limit_train_batches=0.5)


@pytest.mark.parametrize(("limit", "batches"), [(2, 2), (0.5, 3), (1.0, 7)])
def test_evaluations_have_the_results_of_the_first_batches(tmp_path: Path, limit: float, batches: int) -> None:
    trainer, seen = run(tmp_path, limit_eval_batches=limit, num_epochs=1)
    assert seen.evaluated == [batches]
    expected = Trainer(trainer.model, TrainingConfig(output_dir=tmp_path / "x"), DATA).evaluate(
        Subset(DATA, range(min(50, 8 * batches)))
    )
    assert trainer.evaluate() == pytest.approx(expected)
    if isinstance(limit, float):
        with pytest.raises(ConfigError, match=r"limit_eval_batches: got .*no length"):
            trainer.evaluate(DATA[at : at + 8] for at in range(0, 50, 8))


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"limit_eval_batches": 2}, "Trainer.evaluate: 2 of 7 batches (TrainingConfig.limit_eval_batches)."),
        ({"overfit_batches": 3}, "Trainer.evaluate: 3 of 7 batches (TrainingConfig.overfit_batches)."),
        ({"fast_dev_run": 1}, "Trainer.evaluate: 1 of 7 batches (TrainingConfig.fast_dev_run)."),
        ({"limit_eval_batches": 7}, None),
        ({}, None),
    ],
)
def test_a_limit_of_data_that_are_passed_is_logged(
    settings: dict[str, Any], line: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "trainwright")
    trainer = Trainer(nn.Linear(6, 3), TrainingConfig(output_dir=tmp_path, eval_batch_size=8, **settings), DATA, DATA)
    trainer.evaluate()
    assert "Trainer.evaluate: " not in caplog.text
    trainer.evaluate(DATA)
    assert [one.message for one in caplog.records if one.message.startswith("Trainer.evaluate: ")] == (
        [] if line is None else [line]
    )


def test_overfit_batches_trains_and_evaluates_on_the_same_batches(tmp_path: Path) -> None:
    trainer, seen = run(tmp_path, overfit_batches=2, eval_batch_size=3, num_epochs=40)
    assert all(torch.equal(batch, INPUTS[8 * (i % 2) : 8 * (i % 2) + 8]) for i, batch in enumerate(seen.train))
    assert len(seen.train) == 80
    assert set(seen.evaluated) == {2}
    assert trainer.evaluate()["loss"] < trainer.evaluate(Subset(DATA, range(16, 50)))["loss"]
    assert trainer.evaluate() == pytest.approx(Trainer(
        trainer.model, TrainingConfig(output_dir=tmp_path / "x", eval_batch_size=8), DATA
    ).evaluate(Subset(DATA, range(16))))  # fmt: skip


def test_a_loader_that_shuffles_cannot_repeat_its_batches(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(tmp_path, None, loader=DataLoader(DATA, 8, shuffle=True), overfit_batches=2, num_epochs=1)
    assert "overfit_batches: the passed loader shuffles" in caplog.text


def test_shares_are_of_all_steps(tmp_path: Path) -> None:
    trainer, seen = run(tmp_path, eval_strategy="step", eval_steps=0.25, save_steps=0.5)
    assert len(seen.evaluated) == 4  # after 5, 10, 15 and 18 of 18 steps
    assert sorted(p.name for p in trainer.checkpoints_dir.iterdir() if p.is_dir() and p.name[0] != ".") == [
        "09", "18", "model_best",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"overfit_batches": 2, "limit_train_batches": 3}, "overfit_batches: got 2 with limit_train_batches=3"),
        ({"limit_train_batches": 0}, "limit_train_batches: got 0 .*a whole number >= 1, a share"),
        ({"limit_eval_batches": 1.5}, "limit_eval_batches: got 1.5"),
        ({"overfit_batches": -1}, "overfit_batches: got -1"),
    ],
)
def test_wrong_limits_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainingConfig(**settings)


@pytest.mark.parametrize(("setting", "steps"), [(True, 1), (3, 3)])
def test_fast_dev_run_does_everything_once_and_leaves_no_file(
    setting: Any, steps: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "trainwright")
    folder, events = tmp_path / "run", tmp_path / "events"
    trainer, seen = run(
        folder, fast_dev_run=setting, save_enabled=True, load_best_model_at_end=True,
        tensorboard={"log_dir": str(events)}, resume_from_checkpoint=True,
        metric_for_best_model="accuracy", max_steps=40,
    )  # fmt: skip
    assert (trainer.state.global_step, seen.evaluated) == (steps, [steps])
    assert (trainer.checkpoints_dir / "model_best").exists()
    assert len(trainer.predict(DATA)) == 8 * steps
    assert list(tmp_path.iterdir()) == []
    assert f"Nothing was written to {folder}" in caplog.text
    assert f"fast_dev_run completed without errors: {steps} training step" in caplog.text
    written = trainer.output_dir
    assert written.exists()
    config = TrainingConfig(output_dir=folder, fast_dev_run=setting)
    assert Trainer(nn.Linear(6, 3), config, DATA).config is not config
    assert config.output_dir == str(folder)


class Recorder(Callback):
    def __init__(self, calls: list[str]) -> None:
        for moment in (name for name in dir(Callback) if name.startswith("on_")):
            setattr(self, moment, lambda *_, moment=moment: calls.append(moment.removeprefix("on_")))


@pytest.mark.parametrize("is_frozen", [False, True])
def test_freeze_bn_keeps_running_statistics(is_frozen: bool, tmp_path: Path) -> None:
    model = make()
    Trainer(model, config(tmp_path, num_epochs=1, freeze_bn=is_frozen), PAIRS).train()
    assert torch.equal(model[1].running_mean, make()[1].running_mean) is is_frozen


def test_the_order_of_calls_is_that_of_the_document(tmp_path: Path) -> None:
    calls: list[str] = []
    trainer = Trainer(make(), config(tmp_path, batch_size=20, num_epochs=2, eval_batch_size=40), PAIRS, PAIRS)
    trainer.add_callback(Recorder(calls))
    trainer.train()
    train_batch = ["train_batch_begin", "batch_begin", "train_batch_end", "batch_end"]
    evaluation = ["eval_begin", "eval_batch_begin", "batch_begin", "eval_batch_end", "batch_end", "eval_end"]
    epoch = ["epoch_begin", *train_batch, *train_batch, *evaluation, "epoch_end"]
    assert calls == ["train_begin", *epoch, *epoch, "train_end"]


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
    assert [row["eval_loss"] for row in rows if "eval_loss" in row] == pytest.approx(seen)
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
    assert "rises again" not in caplog.text
    one_cycle(tmp_path, 15).train()
    assert "total_steps=15, but this run steps it only 3 times (every 5 steps)" in caplog.text


@pytest.mark.parametrize(("length", "warned"), [(1, False), (2, True), (3, False), (9, False)])  # 1: several waves
def test_a_cosine_that_is_shorter_than_the_run_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, length: int, warned: bool
) -> None:
    Trainer(
        make(), config(tmp_path, num_epochs=3, lr_scheduler={"name_": "CosineAnnealingLR", "T_max": length}), PAIRS
    ).train()
    text = f"T_max={length}, but this run steps it 3 times (every 5 steps), so the learning rate rises again"
    assert any(text in record.getMessage() and record.levelname == "WARNING" for record in caplog.records) == warned


@pytest.mark.parametrize(
    ("schedule", "at"),
    [
        ({"name_": "StepLR", "step_size": 1, "gamma": 0.1}, 6),
        ({"name_": "StepLR", "step_size": 2, "gamma": 0.01}, 6),
        ({"name_": "ExponentialLR", "gamma": 0.1}, 6),
        ({"name_": "StepLR", "step_size": 5, "gamma": 0.1}, None),
        ({"name_": "ExponentialLR", "gamma": 0.9}, None),
    ],
)
def test_a_decay_that_ends_long_before_the_run_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, schedule: dict[str, Any], at: int | None
) -> None:
    Trainer(make(), config(tmp_path, num_epochs=4, lr_scheduler=schedule, lr_scheduling_steps=1), PAIRS).train()
    text = f"this run steps it 20 times (every 1 steps), and after {at} of them the learning rate is below a millionth"
    assert (text in caplog.text) == (at is not None)
    assert ("below a millionth" in caplog.text) == (at is not None)


@pytest.mark.parametrize(
    ("changes", "is_warned"),
    [
        ({}, True),
        ({"early_stopping": {"patience": 2}}, False),
        ({"max_steps": 30}, False),
        ({"lr_scheduling_steps": 1}, False),
    ],
)
def test_milestones_of_a_schedule_of_updates_that_are_epochs_are_a_warning(
    changes: dict[str, Any], is_warned: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = WarmupMultiStepLR(optimizer, 30, 0.001, 0, [1, 2])
    settings = {"output_dir": tmp_path, "num_epochs": 3, "batch_size": 4, "tensorboard": None, **changes}
    Trainer(model, TrainingConfig(**settings), PAIRS, PAIRS, optimizer=optimizer, lr_scheduler=schedule).train()
    text = "after each update). For epochs 1 and 2 of 3 write milestones=[10, 20]."
    assert (text in caplog.text) == is_warned
    assert ("write milestones" in caplog.text) == is_warned


@pytest.mark.parametrize("is_cosine", [False, True])
def test_a_schedule_that_is_assigned_between_two_trainings_has_the_length_of_the_second(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_cosine: bool
) -> None:
    schedules = torch.optim.lr_scheduler
    trainer = Trainer(make(), config(tmp_path, num_epochs=1), PAIRS)
    trainer.train()
    trainer.config.num_epochs = 3
    one = trainer.optimizer
    trainer.lr_scheduler = schedules.CosineAnnealingLR(one, 10) if is_cosine else schedules.OneCycleLR(one, 0.1, 10)
    trainer.train()
    assert trainer.lr_scheduler.last_epoch == 10
    assert "this run steps it" not in caplog.text


def test_a_cosine_without_the_last_batches_is_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    schedule = {"name_": "CosineAnnealingLR", "T_max": 14}
    Trainer(make(), config(tmp_path, num_epochs=3, lr_scheduler=schedule, lr_scheduling_steps=1), PAIRS).train()
    assert "rises again" not in caplog.text


@pytest.mark.parametrize(
    ("schedule", "warned"),
    [
        ({"name_": "StepLR", "step_size": 5}, "StepLR: got step_size=5"),
        ({"name_": "MultiStepLR", "milestones": [10, 5]}, "MultiStepLR: got milestones=[5, 10]"),
        ({"name_": "CosineAnnealingLR", "T_max": 15}, "CosineAnnealingLR: got T_max=15"),
        ({"name_": "CosineAnnealingWarmRestarts", "T_0": 5}, "CosineAnnealingWarmRestarts: got T_0=5"),
        ({"name_": "StepLR", "step_size": 4}, None),  # of epochs, in a run that tries a longer one
        ({"name_": "CosineAnnealingLR", "T_max": 3}, None),
        ({"name_": "StepLR", "step_size": 30}, None),  # not of batches, either
        ("constant", None),
    ],
)
def test_a_schedule_that_counts_batches_and_is_stepped_once_an_epoch_is_a_warning(
    schedule: Any, warned: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Trainer(
        make(), config(tmp_path / "batches", num_epochs=3, lr_scheduler=schedule, lr_scheduling_steps=1), PAIRS
    ).train()
    assert "but this run steps it only" not in caplog.text
    Trainer(make(), config(tmp_path / "epochs", num_epochs=3, lr_scheduler=schedule), PAIRS).train()
    found = [text for text in caplog.messages if "but this run steps it only" in text]
    if warned is None:
        assert not found
        return
    assert [text.partition(", but")[0] for text in found] == [warned]
    assert "only 3 times (every 5 steps), so the learning rate never reaches that step." in found[0]
    assert found[0].endswith("or set lr_scheduling_steps=1 to count batches.")
