"""The time that a training spends in each phase."""

import logging
import time
from typing import Any

import pytest
import torch

from tests.spent_time import about, eager, spend
from trainwright.events.phases import importing
from trainwright.hooks import CallbackHook, EvalHook, HookBase, IterationTimer, PeriodicCheckpointer


class SlowSGD(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        spend(0.003)
        super().step()


class Marks(HookBase):
    """When the first step began and the last one, with its hooks, ended. Stands last."""

    first = 0.0

    def before_step(self) -> None:
        self.first = self.first or time.perf_counter()

    def after_step(self) -> None:
        self.last = time.perf_counter()


class Saver:
    save_dir, save_to_disk = ".", True

    def save(self, name: str, **extra: Any) -> None:
        spend(0.05)

    def wait(self, *, alone: bool = False) -> None:
        pass

    def check_folder(self) -> None: ...

    def prepare(self) -> None:
        pass

    def rehearse(self) -> None:
        pass


@pytest.mark.usefixtures("clock")
def test_each_phase_has_its_seconds() -> None:
    trainer = eager(forward_s=0.002, data_s=0.004, optimizer=SlowSGD)
    trainer.register_hooks([IterationTimer(), CallbackHook(after_step=lambda t: spend(0.001))])
    trainer.train(0, 20)
    phases = trainer.phases
    assert (phases.data, phases.forward) == (about(0.08), about(0.04))
    assert (phases.optimizer, phases.hooks) == (about(0.06), about(0.02))
    assert phases.backward == phases.evaluation == phases.save == 0


def test_the_phases_add_up_to_the_time_from_the_first_step_to_the_last() -> None:
    trainer, marks = eager(), Marks()
    trainer.register_hooks([IterationTimer(), marks])
    trainer.train(0, 500)  # of 100 us
    assert trainer.phases.total == pytest.approx(marks.last - marks.first, rel=0.05)


@pytest.mark.usefixtures("clock")
def test_evaluations_and_saves_are_counted_by_themselves_and_among_hooks() -> None:
    def evaluate() -> dict[str, float]:
        spend(0.02)
        return {"acc": 1.0}

    trainer = eager()
    trainer.register_hooks([IterationTimer(), PeriodicCheckpointer(Saver(), period=4), EvalHook(5, evaluate)])
    trainer.train(0, 12)
    phases = trainer.phases
    assert phases.evaluation == about(3 * 0.02)  # iterations 5, 10, and the last
    assert phases.save == about(5 * 0.05)  # model_0000003, 7, 11, and final before and after the last evaluation
    assert phases.hooks == about(2 * 0.02 + 2 * 0.05)  # between steps


@pytest.mark.usefixtures("clock")
def test_packages_that_an_evaluation_loads_are_imports_and_not_the_evaluation(caplog: pytest.LogCaptureFixture) -> None:
    def evaluate() -> dict[str, float]:
        spend(0.1)
        if trainer.phases.imports == 0:
            with importing(), importing():  # a package that loads another one
                spend(3.0)
        return {"acc": 1.0}

    trainer = eager(forward_s=0.05)
    trainer.register_hooks([IterationTimer(), EvalHook(20, evaluate)])
    with caplog.at_level(logging.INFO):
        trainer.train(0, 61)
    assert trainer.phases.imports == about(3.0)
    assert trainer.phases.evaluation == about(0.4)
    *_, times, result = [record.getMessage() for record in caplog.records]  # no advice
    assert result == "Evaluation  iteration 61/61  acc 1.000"
    assert times == "Time: forward 48 %, evaluation 5 %, imports 48 %."
