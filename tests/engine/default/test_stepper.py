"""What makes the steps of a run, and what is reported about one of the user's own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.default.test_default_trainer import config
from trainwright import DefaultTrainer
from trainwright.config.errors import ConfigError
from trainwright.engine import EagerTrainer, GraphTrainer


@pytest.mark.parametrize(("is_graph", "kind"), [(False, EagerTrainer), (True, GraphTrainer)])
def test_the_configuration_chooses_the_stepper(is_graph: bool, kind: type, tmp_path: Path) -> None:
    cfg = config(tmp_path, num_accumulation_steps=2, global_batch_size=16, non_finite="warn")
    cfg.graph.enabled = is_graph
    stepper = DefaultTrainer(cfg)._trainer
    assert type(stepper) is kind
    assert stepper.grad_acc_steps == 2


def test_a_stepper_that_replaces_the_built_one_has_its_own_settings(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = DefaultTrainer(config(tmp_path, num_accumulation_steps=2, global_batch_size=16, train_iter=2))
    trainer._trainer = EagerTrainer(trainer.model, trainer.train_loader, trainer.optimizer)
    trainer.train()
    assert "train.num_accumulation_steps=2 has no effect" in caplog.text


def test_a_step_that_the_stepper_does_not_call_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class OwnLoop(EagerTrainer):
        def run_step(self, get_batch: Callable[..., Any] | None = None, input_placement_device: Any = None) -> None:
            super().run_step(get_batch, input_placement_device)

    class OwnStep(DefaultTrainer):
        def train_step(self, model: Any, inputs: Any) -> Any:
            return super().train_step(model, inputs)

    trainer = OwnStep(config(tmp_path, train_iter=2))
    trainer._trainer = OwnLoop(trainer.model, trainer.train_loader, trainer.optimizer)
    trainer.train()
    assert "OwnStep.train_step has no effect: trainer._trainer, a OwnLoop, has its own run_step." in caplog.text


def test_a_step_cannot_be_assigned_after_the_stepper_is_built(tmp_path: Path) -> None:
    trainer: Any = DefaultTrainer(config(tmp_path))
    trainer.train_step = lambda model, inputs: {}
    with pytest.raises(ConfigError, match="was assigned after __init__"):
        trainer.train()
