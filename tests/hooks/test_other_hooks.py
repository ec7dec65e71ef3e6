"""Evaluation, schedule, timer and writers around a training."""

import logging
from typing import Any

import pytest
import torch
from torch import nn

from trainwright.config.errors import ConfigError
from trainwright.engine.loop import TrainerBase
from trainwright.events import EventStorage, EventWriter, get_event_storage
from trainwright.hooks import CallbackHook, EvalHook, IterationTimer, LRScheduler, PeriodicWriter


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


def test_the_rate_that_is_recorded_is_the_one_the_iteration_used() -> None:
    trainer = Trainer()
    trainer.register_hooks([LRScheduler()])
    trainer.train(0, 4)
    assert trainer.storage.history("lr").values() == [(1.0, 0), (0.5, 1), (pytest.approx(1 / 3), 2), (0.25, 3)]
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(0.2)


def test_the_rate_of_the_largest_group_is_recorded() -> None:
    trainer = Trainer()
    layers = [nn.Linear(2, 2) for _ in range(3)]
    groups = [{"params": list(layers[0].parameters())[:1], "lr": 1.0}]
    groups.append({"params": [p for layer in layers[1:] for p in layer.parameters()], "lr": 2.0})
    trainer.optimizer = torch.optim.SGD(groups, lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(trainer.optimizer, lambda step: 1.0)
    trainer.register_hooks([LRScheduler(trainer.optimizer, scheduler)])
    trainer.train(0, 1)
    assert trainer.storage.history("lr").latest() == 2.0


def test_the_commonest_rate_where_every_group_is_one_parameter() -> None:
    trainer = Trainer()
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(3)]
    groups = [{"params": [p], "lr": lr} for p, lr in zip(parameters, (0.5, 0.25, 0.25), strict=True)]
    trainer.optimizer = torch.optim.SGD(groups)
    scheduler = torch.optim.lr_scheduler.LambdaLR(trainer.optimizer, lambda step: 1.0)
    trainer.register_hooks([LRScheduler(trainer.optimizer, scheduler)])
    trainer.train(0, 1)
    assert trainer.storage.history("lr").latest() == 0.25


def test_the_timer_records_from_the_third_iteration() -> None:
    trainer = Trainer()
    trainer.register_hooks([IterationTimer(warmup_iter=3)])
    trainer.train(0, 5)
    assert [iteration for _, iteration in trainer.storage.history("time").values()] == [2, 3, 4]


@pytest.mark.parametrize(("start", "timed"), [(0, [1, 2, 3, 4]), (10, [10, 11, 12, 13, 14])])
def test_the_timer_leaves_out_the_first_iterations_of_a_run(
    caplog: pytest.LogCaptureFixture, start: int, timed: list[int]
) -> None:
    trainer = Trainer()
    trainer.register_hooks([IterationTimer(warmup_iter=2)])
    with caplog.at_level(logging.INFO):
        trainer.train(start, start + 5)
    assert [iteration for _, iteration in trainer.storage.history("time").values()] == timed
    assert "Trained 5 iterations" in caplog.text


class Memory(EventWriter):
    def __init__(self) -> None:
        self.rows: list[tuple[int, list[str]]] = []
        self.closed = False

    def write(self, storage: EventStorage | None = None) -> None:
        storage = storage or get_event_storage()
        self.rows.append((storage.iter, sorted(storage.latest())))

    def close(self) -> None:
        self.closed = True


def test_writers_write_each_period_at_the_last_iteration_and_at_the_end() -> None:
    trainer, memory = Trainer(), Memory()
    final = CallbackHook(after_train=lambda t: t.storage.put_scalar("final", 1.0))
    trainer.register_hooks([final, PeriodicWriter([memory], period=3)])
    trainer.train(0, 8)
    assert memory.rows == [(2, []), (5, []), (7, []), (8, ["final"])]
    assert memory.closed


def test_writers_are_closed_after_a_failure() -> None:
    trainer, memory = Trainer(fails_at=1), Memory()
    trainer.register_hooks([PeriodicWriter([memory], period=3)])
    with pytest.raises(ZeroDivisionError):
        trainer.train(0, 8)
    assert memory.closed
    assert memory.rows[-1][0] == 0  # the last iteration done


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
            )
        ]
    )
    trainer.train(0, 1)
    assert calls == ["before_train", "before_step 0", "after_step 0", "after_train"]
