"""A run has its settings under one vocabulary, and copies of itself that change nothing of it, in both APIs."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.inspect.check.seeded_bugs import config_files
from tests.toys import Classifier, file_config, points
from trainwright import DefaultTrainer, Trainer, TrainingConfig
from trainwright.config import ConfigError


def python(folder: Path) -> Any:
    config = TrainingConfig(
        output_dir=str(folder), num_epochs=1, batch_size=4, gradient_accumulation_steps=2, seed=7, early_stopping=None
    )
    return Trainer(Classifier(seed=0), config, points())


def by_config(folder: Path) -> Any:
    sizes = {"train_micro_batch_size": 4, "num_accumulation_steps": 2}
    return DefaultTrainer(file_config(folder, lambda: Classifier(seed=0), points, seed=7, train_iter=2, **sizes))


@pytest.mark.parametrize("make", [python, by_config])
def test_the_settings_have_one_vocabulary(make: Any, tmp_path: Path) -> None:
    spec = make(tmp_path).run.spec
    assert (spec.batch_size, spec.gradient_accumulation_steps, spec.seed) == (4, 2, 7)
    assert spec.mixed_precision is None
    assert Path(spec.output_dir) == tmp_path


@pytest.mark.parametrize("make", [python, by_config])
def test_a_trained_copy_changes_nothing_of_the_run(make: Any, tmp_path: Path) -> None:
    trainer = make(tmp_path / "run")
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    new = trainer.run.copy(tmp_path / "copy", batch_size=2)
    batch = new.run.prepare(new.run.batches.first(1)[0])
    assert len(batch["labels"]) == 2
    assert torch.equal(new.run.loss(batch), trainer.run.loss(batch))
    new.train()
    assert any(not torch.equal(value, before[name]) for name, value in new.model.state_dict().items())
    assert all(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())
    assert trainer.run.spec.batch_size == 4


def test_parts_of_the_trainer_are_those_of_its_run(tmp_path: Path) -> None:
    trainer = python(tmp_path)
    trainer.lr_scheduler = other = torch.optim.lr_scheduler.ConstantLR(trainer.optimizer)
    assert trainer.run.lr_scheduler is other
    assert trainer.run.model is trainer.model
    assert trainer.optimizers == {"optimizer": trainer.optimizer}


def test_both_apis_have_the_same_checks() -> None:
    assert Trainer.check is DefaultTrainer.check


def test_a_replaced_inner_trainer_is_refused(tmp_path: Path) -> None:
    trainer: Any = config_files(tmp_path / "run")
    trainer._trainer = object()
    with pytest.raises(ConfigError, match=r"trainer\._trainer was replaced"):
        trainer.check()
