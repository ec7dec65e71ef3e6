"""Evaluations during a training."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from trainwright.base.errors import ConfigError
from trainwright.engine.loop import TrainerBase
from trainwright.hooks import CallbackHook, EvalHook, LRScheduler, ReduceOnPlateau


class Trainer(TrainerBase):
    def __init__(self, fails_at: int | None = None) -> None:
        super().__init__()
        self.fails_at = fails_at
        self.model = nn.Linear(2, 1)
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.lr_scheduler: Any = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (step + 1))

    def run_step(self) -> None:
        if self.iter == self.fails_at:
            raise ZeroDivisionError
        self.optimizer.step()


@pytest.mark.parametrize(("period", "at"), [(3, [2, 5, 8]), (4, [3, 8]), (0, [8]), (8, [8])])
def test_evaluation_runs_each_period_and_once_at_the_end(period: int, at: list[int]) -> None:
    evaluated: list[int] = []
    trainer = Trainer()
    trainer.register_hooks([EvalHook(period, lambda: evaluated.append(trainer.iter) or {"acc": 1.0})])
    assert trainer.train(0, 8) == {"acc": 1.0}
    assert evaluated == at


@pytest.mark.parametrize("loss", [1.5, math.nan])
def test_a_final_evaluation_that_repeats_that_of_the_last_iteration_stores_nothing(loss: float) -> None:
    trainer, hook = Trainer(), EvalHook(0, lambda: {"acc": 0.5, "loss": loss}, prefix="eval_")
    last = CallbackHook(after_step=lambda trainer: hook.evaluate() if trainer.iter == 7 else None)
    trainer.register_hooks([last, hook])
    trainer.train(0, 8)
    assert {at for _, at in trainer.storage.latest().values()} == {7}


def test_no_final_evaluation_after_a_failure_even_in_the_last_iteration() -> None:
    evaluated: list[int] = []
    trainer = Trainer(fails_at=7)
    trainer.register_hooks([EvalHook(0, lambda: evaluated.append(1) or {})])
    with pytest.raises(ZeroDivisionError):
        trainer.train(0, 8)
    assert evaluated == []


def test_nested_results_are_flattened_and_nothing_is_allowed() -> None:
    results = iter([{"a": {"b": 1, "c": torch.tensor(2.0)}}, None, {}])
    trainer = Trainer()
    trainer.register_hooks([EvalHook(1, lambda: next(results))])
    trainer.train(0, 3)
    assert {k: v for k, (v, _) in trainer.storage.latest().items()} == {"a/b": 1.0, "a/c": 2.0}


@pytest.mark.parametrize("results", [{"acc": "high"}, {"acc": torch.ones(2)}, [1.0]])
def test_results_that_are_not_numbers_are_refused(results: Any) -> None:
    trainer = Trainer()
    trainer.register_hooks([EvalHook(1, lambda: results)])
    with pytest.raises(ConfigError, match="evaluation function returned"):
        trainer.train(0, 2)


def test_a_period_may_be_a_function_and_results_may_have_a_prefix() -> None:
    evaluated: list[int] = []
    trainer = Trainer()
    evaluate = lambda: evaluated.append(trainer.iter) or {"acc": 1.0}  # noqa: E731
    trainer.register_hooks([EvalHook(lambda: trainer.iter in (1, 4, 7), evaluate, prefix="eval_")])
    trainer.train(0, 8)
    assert evaluated == [1, 4, 8]  # not twice at the end
    assert list(trainer.storage.latest()) == ["eval_acc"]
    named = Trainer()
    results = {"eval_acc": 1.0, "loss": 2.0, "f1": 3.0, "eval_f1": 4.0}
    named.register_hooks([EvalHook(2, lambda: results, prefix="eval_")])
    named.train(0, 2)
    found = {name: value for name, (value, _) in named.storage.latest().items()}
    # A prefix of the user's is not repeated, unless another result would get this name.
    assert found == {"eval_acc": 1.0, "eval_loss": 2.0, "eval_f1": 3.0, "eval_eval_f1": 4.0}


def test_callback_hook_calls_the_functions_it_has() -> None:
    calls: list[str] = []
    trainer = Trainer()
    trainer.register_hooks(
        [
            CallbackHook(
                before_train=lambda t: calls.append("before_train"),
                before_step=lambda t: calls.append(f"before_step {t.iter}"),
                after_step=lambda t: calls.append(f"after_step {t.iter}"),
                after_train=lambda t: calls.append("after_train"),
                after_end=lambda t: calls.append(f"after_end {t.has_failed}"),
            )
        ]
    )
    trainer.train(0, 1)
    assert calls == ["before_train", "before_step 0", "after_step 0", "after_train", "after_end False"]


# The schedule that a training steps, and the rate that is recorded.


def test_the_rate_that_is_recorded_is_the_one_the_iteration_used() -> None:
    trainer = Trainer()
    trainer.register_hooks([LRScheduler()])
    trainer.train(0, 4)
    assert trainer.storage.history("lr").values() == [(1.0, 0), (0.5, 1), (pytest.approx(1 / 3), 2), (0.25, 3)]
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("sizes", "rates", "recorded"),
    [([1, 4], [1.0, 2.0], 2.0), ([1, 1, 1], [0.5, 0.25, 0.25], 0.25)],
    ids=["the largest group", "the commonest of equal groups"],
)
@pytest.mark.parametrize("has_schedule", [True, False])
def test_the_rate_that_stands_for_all(
    sizes: list[int], rates: list[float], recorded: float, has_schedule: bool
) -> None:
    trainer = Trainer()
    layers = [[nn.Parameter(torch.zeros(1)) for _ in range(size)] for size in sizes]
    trainer.optimizer = torch.optim.SGD([{"params": p, "lr": lr} for p, lr in zip(layers, rates, strict=True)])
    trainer.lr_scheduler = None
    if has_schedule:
        trainer.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(trainer.optimizer, lambda step: 1.0)
    trainer.register_hooks([LRScheduler()])
    trainer.train(0, 2)
    assert trainer.storage.history("lr").values() == [(recorded, 0), (recorded, 1)]


def test_a_schedule_is_stepped_when_its_period_is_over() -> None:
    trainer = Trainer()
    trainer.register_hooks([LRScheduler(period=2)])
    trainer.train(0, 4)
    assert [value for value, _ in trainer.storage.history("lr").values()] == [1.0, 1.0, 0.5, 0.5]


def test_a_schedule_that_the_step_has_stepped_is_not_stepped_again() -> None:
    class OwnStep(Trainer):
        def run_step(self) -> None:
            super().run_step()
            self.lr_scheduler.step()

    trainer = OwnStep()
    trainer.register_hooks([LRScheduler()])
    trainer.train(0, 4)
    assert trainer.lr_scheduler.last_epoch == 4


def test_the_schedule_of_a_new_optimizer_is_used() -> None:
    def replace(trainer: Any) -> None:
        if trainer.iter == 1:
            trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=8.0)
            trainer.lr_scheduler = torch.optim.lr_scheduler.ExponentialLR(trainer.optimizer, 0.5)

    trainer = Trainer()
    trainer.register_hooks([LRScheduler(), CallbackHook(after_step=replace)])
    trainer.train(0, 4)
    assert [value for value, _ in trainer.storage.history("lr").values()] == [1.0, 0.5, 8.0, 4.0]


def test_a_plateau_is_stepped_with_each_evaluation() -> None:
    trainer = Trainer()
    trainer.lr_scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(trainer.optimizer, "max", 0.5, patience=0)
    scores = iter([0.5, 0.6, 0.6, 0.6])
    latest = lambda: trainer.storage.latest()["acc"][0]  # noqa: E731
    trainer.register_hooks([LRScheduler(), EvalHook(2, lambda: {"acc": next(scores)}), ReduceOnPlateau(latest)])
    trainer.train(0, 8)
    assert trainer.storage.history("lr").latest() == 0.5
    assert trainer.optimizer.param_groups[0]["lr"] == 0.25  # after the final evaluation
    without = Trainer()
    without.lr_scheduler = trainer.lr_scheduler
    without.register_hooks([LRScheduler()])
    with pytest.raises(ConfigError, match=r"no hook does so.*The hook ReduceOnPlateau steps by a metric of yours"):
        without.train(0, 8)


def set_rate(trainer: Any, rate: float = 0.3) -> None:
    trainer.optimizer.param_groups[0]["lr"] = rate


def set_both(trainer: Any) -> None:
    set_rate(trainer)
    trainer.lr_scheduler.base_lrs = [0.3]


def set_at(*iterations: int) -> CallbackHook:
    return CallbackHook(before_step=lambda trainer: set_rate(trainer) if trainer.iter in iterations else None)


@pytest.mark.parametrize(
    ("hook", "period", "warns"),
    [
        (set_at(3), 1, True),
        (set_at(2, 4, 6), 1, True),
        (CallbackHook(after_step=lambda trainer: set_rate(trainer) if trainer.iter == 3 else None), 1, True),
        (CallbackHook(before_train=set_rate), 1, True),
        (set_at(1), 4, True),
        (set_at(*range(8)), 1, False),
        (set_at(*range(3)), 1, False),  # a warm-up
        (set_at(7), 1, False),  # the last iteration
        (set_at(0, 4), 4, False),
        (CallbackHook(before_step=lambda trainer: set_both(trainer) if trainer.iter == 3 else None), 1, False),
    ],
)
def test_a_rate_that_the_schedule_sets_again_is_a_warning(
    hook: CallbackHook, period: int, *, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = Trainer()
    trainer.register_hooks([LRScheduler(period=period), hook])
    trainer.train(0, 8)
    texts = [text for text in caplog.messages if "set to 0.3 and lost with the next step of LambdaLR" in text]
    assert len(texts) == warns


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
        lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2),
        lambda optimizer: torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0),
    ],
)
def test_a_schedule_that_continues_from_a_rate_that_is_set_is_no_warning(
    make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = Trainer()
    trainer.lr_scheduler = make(trainer.optimizer)
    trainer.register_hooks([LRScheduler(), set_at(3)])
    trainer.train(0, 8)
    assert not caplog.messages
    assert trainer.storage.history("lr").values()[3] == (0.3, 3)
