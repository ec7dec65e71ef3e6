"""Optimizer, schedule, precision and clipping of a TrainingConfig, compared with loops by hand."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ChainedScheduler, ExponentialLR, LinearLR

from tests.toys import assert_equal_weights
from tests.trainer import contracts
from tests.trainer.conftest import PAIRS, Scripted, config, equal, make
from trainwright import Trainer


def rates(trainer: Trainer) -> list[float]:
    return [rate for rate, _ in trainer.storage.history("lr").values()]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [({}, [0.01] * 5 + [0.001] * 5 + [0.0001] * 5), ({"lr_scheduling_steps": 10}, [0.01] * 10 + [0.001] * 5)],
)
@pytest.mark.parametrize("is_object", [False, True])
def test_schedules_of_torch_step_once_an_epoch_or_as_often_as_said(
    is_object: bool, settings: dict[str, Any], expected: list[float], tmp_path: Path
) -> None:
    model, parts = make(), {}
    if is_object:
        parts["optimizer"] = torch.optim.Adam(model.parameters(), lr=0.01)
        parts["lr_scheduler"] = torch.optim.lr_scheduler.StepLR(parts["optimizer"], 1, gamma=0.1)
    else:
        settings = {"lr_scheduler": "step", "lr_scheduler_kwargs": {"step_size": 1, "gamma": 0.1}, **settings}
    trainer = Trainer(model, config(tmp_path, num_epochs=3, **settings), PAIRS, **parts)
    trainer.train()
    assert rates(trainer) == pytest.approx(expected)


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("every", [1, 2, 5])
def test_a_schedule_steps_between_the_batches_of_an_update(every: int, named: bool, tmp_path: Path) -> None:
    def parts(model: nn.Module) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=15 // every)

    optimizer, schedule = parts(nn.Linear(1, 1))
    optimizer.step()  # torch would warn of the steps of the schedule before
    expected = []
    for step in range(1, 16):
        if step % 5 in (3, 0):  # epochs of 5 batches, updates of 3 and 2
            expected.append(optimizer.param_groups[0]["lr"])
        if step % every == 0:
            schedule.step()

    def trained(folder: Path, **settings: Any) -> Trainer:
        model = make()
        own, given = parts(model)
        made = {"optimizer": own, "lr_scheduler": given}
        made = {"optimizers": {"one": own}, "lr_schedulers": {"one": given}} if named else made
        fields = {"gradient_accumulation_steps": 3, "lr_scheduling_steps": every, "num_epochs": 3, **settings}
        trainer = Trainer(model, config(folder, **fields), PAIRS, **made)
        trainer.train()
        return trainer

    whole = trained(tmp_path / "whole")
    name = "lr/one" if named else "lr"
    assert [rate for rate, _ in whole.storage.history(name).values()] == pytest.approx(expected)
    trained(tmp_path / "cut", max_steps=5)
    resumed = trained(tmp_path / "cut", resume_from_checkpoint=True)
    assert equal(resumed.model.state_dict(), whole.model.state_dict())


def test_a_plateau_is_one_of_the_metric_for_the_best_model(tmp_path: Path) -> None:
    settings = {"lr_scheduler": "reduce_on_plateau", "lr_scheduler_kwargs": {"patience": 0, "factor": 0.1}}
    trainer = Scripted(make(), config(tmp_path, num_epochs=4, **settings), PAIRS, PAIRS)
    trainer.train()
    assert rates(trainer) == pytest.approx([0.01] * 15 + [0.001] * 5)  # 2.0 after 1.0


def test_a_plateau_steps_after_each_evaluation_that_returns_the_same_dict(tmp_path: Path) -> None:
    class Own(Trainer):
        results: dict[str, float] = {"loss": 1.0}  # noqa: RUF012  # one for all evaluations

        def evaluate(self, dataset: Any = None) -> dict[str, Any]:  # type: ignore[override]
            return self.results

    settings = {"lr_scheduler": "reduce_on_plateau", "lr_scheduler_kwargs": {"patience": 0, "factor": 0.1}}
    given = config(tmp_path, metric=None, num_epochs=4, metric_for_best_model="loss", **settings)
    trainer = Own(make(), given, PAIRS, PAIRS)
    trainer.train()
    assert rates(trainer) == pytest.approx([0.01] * 10 + [0.001] * 5 + [0.0001] * 5)


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


def test_bf16_is_autocast_around_model_and_criterion(tmp_path: Path) -> None:
    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return contracts.pair_loss(model, x, y)

    trainer = Trainer(contracts.make(contracts.Net), contracts.config(tmp_path, amp=True), contracts.PAIRS)
    trainer.train()
    assert_equal_weights(trainer.model, contracts.by_hand(contracts.make(contracts.Net), loss_of))


PLATEAU = {"patience": 0, "factor": 0.5, "threshold": 10.0, "mode": "min"}  # never better


@pytest.mark.parametrize(
    ("settings", "evaluates"),
    [({}, False), ({"eval_strategy": "no"}, True), ({"metric_for_best_model": "train.loss"}, True)],
)
def test_a_plateau_goes_by_the_loss_of_training_where_nothing_is_evaluated(
    settings: dict[str, Any], evaluates: bool, tmp_path: Path
) -> None:
    class Recorder(torch.optim.lr_scheduler.ReduceLROnPlateau):
        def step(self, metrics: Any, epoch: Any = None) -> None:  # type: ignore[override]
            seen.append(float(metrics))
            super().step(metrics)

    seen: list[float] = []
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = Recorder(optimizer, **PLATEAU)
    given = config(tmp_path, metric=None, num_epochs=3, **settings)
    data = PAIRS if evaluates else None
    trainer = Trainer(model, given, PAIRS, data, optimizer=optimizer, lr_scheduler=schedule)
    trainer.train()
    losses = [value for value, _ in trainer.storage.history("total_loss").values()]
    assert seen == pytest.approx([sum(losses[at : at + 5]) / 5 for at in (0, 5, 10)])
    assert optimizer.param_groups[0]["lr"] == 0.1 / 8


@pytest.mark.parametrize("named", [False, True])
def test_chained_schedules_are_a_schedule(named: bool, tmp_path: Path) -> None:
    def chained(optimizer: torch.optim.Optimizer) -> Any:  # it has no last_epoch
        parts = [ExponentialLR(optimizer, 0.5), LinearLR(optimizer, 0.1, total_iters=2)]
        return ChainedScheduler(parts, optimizer=optimizer)

    def run(epochs: int, **settings: Any) -> list[float]:
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = chained(optimizer)
        parts: Any = {"optimizers": {"one": optimizer}, "lr_schedulers": {"one": schedule}}
        parts = parts if named else {"optimizer": optimizer, "lr_scheduler": schedule}
        trainer = Trainer(model, config(tmp_path, num_epochs=epochs, **settings), PAIRS, **parts)
        trainer.train()
        return [rate for rate, _ in trainer.storage.history("lr/one" if named else "lr").values()]

    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    schedule, expected = chained(optimizer), []
    for _ in range(3):
        expected += [optimizer.param_groups[0]["lr"]] * 5
        optimizer.step()
        schedule.step()
    run(1)
    assert run(3, resume_from_checkpoint=True)[-10:] == expected[-10:]


def test_a_plateau_of_a_metric_that_shall_rise(tmp_path: Path) -> None:
    class Rising(Trainer):
        def evaluate(self, dataset: Any = None) -> dict[str, Any]:  # type: ignore[override]
            return {"accuracy": self.epoch / 10}

    settings = {"lr_scheduler": "reduce_on_plateau", "lr_scheduler_kwargs": {"patience": 0}, "num_epochs": 4}
    trainer = Rising(make(), config(tmp_path, **settings, metric_for_best_model="accuracy"), PAIRS, PAIRS)
    trainer.train()
    assert {*rates(trainer)} == {0.01}


def test_the_schedule_runs_over_the_true_number_of_updates(tmp_path: Path) -> None:
    rates: list[float] = []

    class Watching(Trainer):
        def optimization_step(self) -> None:
            rates.append(self.optimizer.param_groups[0]["lr"])
            super().optimization_step()

    settings = {"lr_scheduler_type": "linear", "gradient_accumulation_steps": 3, "warmup_steps": 2}
    trainer = Watching(contracts.make(contracts.Net), contracts.config(tmp_path, **settings), contracts.PAIRS)
    trainer.train()
    assert rates == pytest.approx([0.0, 0.005, 0.01, 0.0075, 0.005, 0.0025])
    assert trainer.lr_scheduler.get_last_lr() == [0.0]


@pytest.mark.parametrize(("steps", "is_named"), [(5, False), (6, True), (1.0, True)])
def test_a_warm_up_as_long_as_the_run_is_a_warning(
    steps: float, is_named: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"lr_scheduler_type": "linear", "gradient_accumulation_steps": 3, "warmup_steps": steps}
    Trainer(contracts.make(contracts.Net), contracts.config(tmp_path, **settings), contracts.PAIRS)
    assert ("the warm-up takes 6 updates, and there are 6" in caplog.text) == is_named
