"""Learning rates, modes, one batch: what is a problem, what is undecided, and what is right."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.inspect.check.seeded_bugs import LeftInEval, WithoutZeroGrad, objects
from trainwright import Trainer
from trainwright.optim import freeze_bn


def one_finding(trainer: Any, check: str) -> Any:
    return trainer.check(only=[check])[check]


def other(kind: type[Trainer], folder: Path, model: nn.Module | None = None, **options: Any) -> Trainer:
    plain = objects(folder / "run")
    settings = plain.config.copy_with(**options.pop("settings", {}))
    return kind(model or plain.model, settings, plain.train_dataset, plain.eval_dataset, **options)


class Ascent(nn.Module):
    """A criterion with the wrong sign."""

    def forward(self, scores: Any, labels: Any) -> Any:
        return -F.cross_entropy(scores, labels)


class Constant(nn.Module):
    def forward(self, scores: Any, labels: Any) -> Any:
        return F.cross_entropy(0 * scores, labels)


class Infinite(nn.Module):
    def forward(self, scores: Any, labels: Any) -> Any:
        return F.cross_entropy(scores, labels) / 0


class Unused(nn.Sequential):
    def forward(self, inputs: Any) -> Any:
        return self[1](inputs)


def with_norm(*, is_frozen: bool) -> nn.Module:
    model = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.Linear(32, 10))
    if is_frozen:
        model[1].requires_grad_(False)
    else:
        freeze_bn(model)
    return model


@pytest.mark.parametrize(
    ("kind", "options", "check", "result", "fact"),
    [
        (Trainer, {"loss": Constant()}, "one_batch", "problem", "does not fall"),
        (Trainer, {"loss": Ascent()}, "one_batch", "passed", ""),
        (Trainer, {"loss": Infinite(), "settings": {"non_finite": "warn"}}, "steps", "problem", ""),
        (Trainer, {"model": Unused(nn.Linear(64, 64), nn.Linear(64, 10))}, "parameters", "problem", "0.weight"),
        (LeftInEval, {}, "modes", "problem", "after an evaluation"),
        (Trainer, {"model": with_norm(is_frozen=True)}, "modes", "passed", ""),
        (Trainer, {"model": with_norm(is_frozen=False)}, "modes", "passed", ""),
    ],
    ids=[
        *("a loss that cannot fall", "a wrong sign falls, too", "a loss that is not finite", "an unused layer"),
        *("left in evaluation mode", "a frozen norm", "freeze_bn"),
    ],
)
def test_one_fault(
    kind: type[Trainer], options: dict[str, Any], check: str, result: str, fact: str, tmp_path: Path
) -> None:
    finding = one_finding(other(kind, tmp_path, **options), check)
    assert finding.result == result
    assert fact in finding.evidence


@pytest.mark.parametrize(
    ("factor", "fact"),
    [
        (lambda step: float(step < 1), "0 in 95% of the 20 steps"),
        (lambda step: 0.5**step, "below 1 % of its highest value in 65% of the 20 steps"),
        (lambda step: min(1.0, step / 40), "the warm-up is longer than the run"),
        (lambda step: 0.1 ** (step // 3), "below 1 %"),
        (lambda step: 0.1 ** (step // 8), None),
        (lambda step: 1 + step / 40, None),
    ],
    ids=["zero", "fast decay", "long warm-up", "steps", "two steps", "growing"],
)
def test_a_schedule_that_does_not_fit_the_run(factor: Any, fact: str | None, tmp_path: Path) -> None:
    trainer = objects(tmp_path / "run")
    optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    trainer = other(Trainer, tmp_path, trainer.model, optimizer=optimizer, lr_scheduler=schedule)
    finding = one_finding(trainer, "learning_rate")
    assert finding.result == ("passed" if fact is None else "problem")
    assert (fact or "") in finding.evidence


@pytest.mark.parametrize("kind", [Trainer, WithoutZeroGrad])
def test_a_loss_that_grows(kind: Any, tmp_path: Path) -> None:
    trainer = other(kind, tmp_path, settings={"learning_rate": 30.0, "lr_scheduler_type": "constant"})
    finding = one_finding(trainer, "steps")
    assert finding.result == ("problem" if kind is Trainer else "undecided")  # a step may report another value
    assert "The loss grows from 2.3" in finding.evidence


def test_a_warmup_from_0_is_right(tmp_path: Path) -> None:
    trainer = other(Trainer, tmp_path, settings={"lr_scheduler_type": "linear", "warmup_ratio": 0.2})
    finding = one_finding(trainer, "learning_rate")
    assert finding.result == "passed"
    assert finding.values["first"][0] < finding.values["highest"][0] == pytest.approx(0.01)


def test_the_forecast(tmp_path: Path) -> None:
    values = one_finding(objects(tmp_path / "run"), "forecast").values
    assert values["updates"] == 420
    assert values["run_seconds"] == pytest.approx(420 * values["seconds_per_update"])
    weights = (64 * 64 + 64 + 64 * 10 + 10) * 4  # bytes
    assert 3 * weights <= values["checkpoint_bytes"] < 4 * weights  # with two moments of Adam
