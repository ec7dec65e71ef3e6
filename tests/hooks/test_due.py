"""When ``after_step`` of a hook is called: the numbers that are computed in advance agree with what a period says."""

import random
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.toys import file_config, points, quiet
from trainwright import DefaultTrainer, Trainer
from trainwright.config.windows import Windows
from trainwright.engine.loop import TrainerBase
from trainwright.engine.state import TrainerState
from trainwright.engine.step_plan import StepPlan
from trainwright.hooks import EvalHook, HookBase
from trainwright.hooks.due import Moment, Recurring


class Loop(TrainerBase):
    def run_step(self) -> None: ...


class Seen(HookBase):
    def __init__(self, *due: Any) -> None:
        self.due, self.at = due, list[int]()

    def after_step(self) -> None:
        self.at.append(self.trainer.iterations_done)


def called_at(*due: Any, start: int = 0, end: int = 10, hooks: tuple[HookBase, ...] = ()) -> list[int]:
    trainer, hook = Loop(), Seen(*due)
    trainer.register_hooks([*hooks, hook])
    trainer.train(start, end)
    return hook.at


@pytest.mark.parametrize(
    ("due", "start", "expected"),
    [
        ((3,), 0, [3, 6, 9]),
        ((3,), 4, [6, 9]),
        ((0,), 0, []),
        ((), 0, []),
        ((4, Moment.FIRST), 4, [5, 8]),
        ((4, Moment.LAST), 0, [4, 8, 10]),
        ((4, 6), 0, [4, 6, 8]),
        ((Recurring(lambda: True, lambda done: 7 if done < 7 else 99),), 0, [1, 7]),  # the first is always asked
    ],
)
def test_a_hook_is_called_after_the_iterations_that_its_moments_name(
    due: tuple[Any, ...], start: int, expected: list[int]
) -> None:
    assert called_at(*due, start=start) == expected


def test_a_function_is_asked_after_each_iteration_also_if_another_moment_is_due() -> None:
    asked = list[int]()
    trainer = Loop()

    def is_due() -> bool:
        asked.append(trainer.iterations_done)
        return trainer.iterations_done in (2, 5)

    hook = Seen(5, is_due)
    trainer.register_hooks([hook])
    trainer.train(0, 6)
    assert (asked, hook.at) == ([1, 2, 3, 4, 5, 6], [2, 5])


def test_a_function_of_a_built_in_hook_is_asked_once_after_each_iteration() -> None:
    """It may change its state: a timer that starts again when it has returned True, for example."""
    asked, evaluated = list[int](), list[int]()
    trainer = Loop()

    def is_due() -> bool:
        asked.append(trainer.iterations_done)
        return len(asked) % 3 == 0

    trainer.register_hooks([EvalHook(is_due, lambda: evaluated.append(trainer.iterations_done))])  # type: ignore[func-returns-value]
    trainer.train(0, 7)
    trainer.train(7, 10)
    assert asked == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    assert evaluated == [3, 6, 7, 9, 10]  # at each end, too


@pytest.mark.parametrize("change", [(2,), (2, Moment.FIRST), None, ()])
def test_the_period_of_a_registered_hook_may_change(change: Any) -> None:
    trainer, hook = Loop(), Seen(5, Moment.FIRST)

    class Change(HookBase):
        def after_step(self) -> None:
            if self.trainer.iterations_done == 6:
                hook.due = change

    trainer.register_hooks([Change(), hook])
    trainer.train(0, 9)
    later = {(): [], None: [6, 7, 8, 9]}.get(change, [6, 8])
    assert hook.at == [1, 5, *later]


def test_moments_that_a_property_returns_are_kept() -> None:
    class Own(Seen):
        @property
        def due(self) -> Any:
            return (4, Moment.FIRST)

        @due.setter
        def due(self, value: Any) -> None: ...

    trainer, hook = Loop(), Own()
    trainer.register_hooks([hook])
    trainer.train(0, 9)
    assert hook.at == [1, 4, 8]


def test_periods_that_have_changed_are_planned_again_in_any_moment() -> None:
    period = [100]
    trainer = Loop()
    done = lambda: trainer.iterations_done  # noqa: E731
    hook = Seen(Recurring(lambda: done() % period[0] == 0, lambda at: (at // period[0] + 1) * period[0]), Moment.FIRST)

    class Change(HookBase):
        def after_step(self) -> None:
            if done() == 6:
                period[0] = 3
                trainer.plan_calls()

    trainer.register_hooks([Change(), hook])
    trainer.train(0, 10)
    assert hook.at == [1, 6, 9]


def test_new_results_call_a_hook_in_the_iteration_that_has_them_and_once() -> None:
    evaluation = EvalHook(4, lambda: {"a": 1.0})
    assert called_at(Moment.RESULTS, end=9, hooks=(evaluation,)) == [1, 4, 8]  # the first results are those of before


def test_the_last_iteration_is_the_one_in_which_a_hook_ends_the_run() -> None:
    class Stop(HookBase):
        def after_step(self) -> None:
            if self.trainer.iter == 2:
                self.trainer.max_iter = 3

    assert called_at(Moment.LAST, hooks=(Stop(),)) == [3]


def test_a_subclass_that_overrides_after_step_is_called_after_each_iteration() -> None:
    evaluated = list[int]()

    class Own(EvalHook):
        num_calls = 0

        def after_step(self) -> None:
            self.num_calls += 1
            super().after_step()

    trainer = Loop()
    hook = Own(4, lambda: evaluated.append(trainer.iterations_done))  # type: ignore[func-returns-value]
    trainer.register_hooks([hook])
    trainer.train(0, 10)
    assert (hook.num_calls, evaluated) == (10, [4, 8, 10])


def test_a_trainer_that_overrides_after_step_keeps_the_periods() -> None:
    class Own(Loop):
        def after_step(self) -> None:
            super().after_step()

    trainer, hook = Own(), Seen(3)
    trainer.register_hooks([hook])
    trainer.train(0, 7)
    assert hook.at == [3, 6]


@pytest.mark.parametrize("seed", range(60))
def test_the_numbers_of_the_python_api_agree_with_its_conditions(seed: int) -> None:
    """For epochs of different lengths, accumulation, and runs that end within an epoch."""
    draw = random.Random(seed)
    length = draw.randint(1, 9)
    windows = Windows.of({0: draw.randint(1, 4), draw.randint(0, 9): draw.randint(1, 4), 7: draw.randint(1, 4)})
    plan = StepPlan(
        steps_per_epoch=length, windows=windows, batch_size=2, samples_per_epoch=2 * length,
        num_epochs=draw.randint(1, 6), max_steps=draw.choice([None, draw.randint(1, 40)]),
    )  # fmt: skip
    trainer = Loop()
    state = TrainerState(trainer, is_elastic=False)
    period, epochs = draw.randint(1, 12), draw.randint(1, 3)
    ends = [
        state.passes(lambda: period),
        state.passes(lambda: 0, otherwise=state.epoch_ends()),
        state.epoch_ends(lambda: epochs),
        state.epoch_ends(lambda: 0),
        state.passes(lambda: period) | state.epoch_ends(lambda: epochs),
    ]
    update = 0
    state.plan = plan
    next_ends = [one.next_end(update) for one in ends]
    while update < state.plan.num_updates:
        begins_epoch = state.plan.epoch_at(state.plan.steps(update))[1] == state.plan.steps(update)
        if begins_epoch and draw.random() < 0.5:
            length = draw.randint(1, 9)
            state.plan = state.plan.with_epoch(state.plan.steps(update), length, 2 * length)
            next_ends = [one.next_end(update) for one in ends]
            if update >= state.plan.num_updates:
                break
        state.step_before, state.global_step = state.plan.steps(update), state.plan.steps(update + 1)
        update += 1
        for one, end in zip(ends, next_ends, strict=True):
            # Beyond the plan nothing is known, so the last update may be named without need.
            assert end == update if one() else end > update or update == state.plan.num_updates
        next_ends = [one.next_end(update) for one in ends]


@pytest.mark.parametrize("epochs", [1, 2, 3])
@pytest.mark.parametrize("length", [Fraction(7, 3), Fraction(1, 2), Fraction(5)])
def test_the_numbers_of_config_files_agree_with_its_conditions(epochs: int, length: Fraction, tmp_path: Path) -> None:
    class Own(DefaultTrainer):
        def build_hooks(self) -> list[HookBase | None]:
            self.run.iterations_per_epoch = lambda: length  # type: ignore[method-assign]
            self.period = self.run._period(0, epochs)
            return []

    trainer = Own(file_config(tmp_path, Net, points, train_iter=30, train_micro_batch_size=4))
    for trainer.iter in range(30):
        assert bool(trainer.period()) == (trainer.period.next_end(trainer.iter) == trainer.iter + 1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, inputs: Any, labels: Any) -> dict[str, Any]:
        return {"loss": nn.functional.cross_entropy(self.linear(inputs), labels)}


def test_hooks_follow_epochs_whose_length_changes(tmp_path: Path) -> None:
    class Own(Trainer):
        def create_train_dataloader(self, dataset: Any) -> Any:
            length = {1: 3, 2: 5, 3: 2}[self.state.epoch]
            return torch.utils.data.DataLoader(torch.utils.data.Subset(dataset, range(length)), batch_size=1)

    data = TensorDataset(torch.randn(8, 4), torch.randint(2, (8,)))
    settings = {"num_epochs": 3, "batch_size": 1, "log_steps": 4, "metrics": []}
    trainer = Own(nn.Linear(4, 2), quiet(tmp_path, **settings), train_dataset=data)
    at_ends, at_steps = Seen(trainer.state.epoch_ends()), Seen(trainer.state.passes(lambda: 4))
    trainer.register_hooks([at_ends, at_steps])
    trainer.train()
    assert (at_ends.at, at_steps.at) == ([3, 8, 10], [4, 8])
