"""A copy has what the user has changed since the trainer was built, and shares nothing that a training changes."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.inspect.check.seeded_bugs import config_files, objects
from trainwright import Trainer
from trainwright.config import ConfigError
from trainwright.hooks import Callback, HookBase
from trainwright.inspect.check.copies import Copies, quiet


class Seen(Callback):
    def __init__(self) -> None:
        self.owner: Any = None
        self.batches = 0

    def on_train_batch_end(self, batch: Any, logs: Any) -> None:
        self.batches += 1


class Counter(HookBase):
    steps = 0

    def after_step(self) -> None:
        self.steps += 1


def copies(trainer: Any, folder: Path, seconds: float = 60) -> Copies:
    return Copies(trainer.run, folder, end=time.perf_counter() + seconds)


def test_a_copy_has_later_changes(tmp_path: Path) -> None:
    trainer: Any = objects(tmp_path / "run")
    trainer.set_optimizer(torch.optim.SGD(trainer.model.parameters(), lr=0.25))
    trainer.set_loss(nn.MultiMarginLoss())
    callback, hook = Seen(), Counter()
    callback.owner = trainer
    trainer.add_callback(callback)
    trainer.register_hooks([hook])
    trainer.head = trainer.model[3]
    found = copies(trainer, tmp_path)
    with quiet():
        made = found.make()
        made.train(2)
    new: Any = made.trainer
    assert isinstance(new.optimizer, torch.optim.SGD)
    assert isinstance(new.loss, nn.MultiMarginLoss)
    assert new.head is new.model[3] is not trainer.head
    (copied,) = [one for one in new.callbacks if isinstance(one, Seen)]
    assert copied.owner is new
    assert (copied.batches, callback.batches) == (2, 0)
    assert [one.steps for one in new._hooks if isinstance(one, Counter)] == [2]
    assert hook.steps == 0
    assert new.train_dataset is trainer.train_dataset
    held = {id(one) for group in new.optimizer.param_groups for one in group["params"]}
    assert held == {id(one) for one in new.model.parameters()}


@pytest.mark.exhaustive(every=2)
@pytest.mark.parametrize("build", [objects, config_files])
def test_a_copy_has_the_current_weights(build: Any, tmp_path: Path) -> None:
    trainer = build(tmp_path / "run")
    with torch.no_grad():
        trainer.model[3].bias.fill_(7.0)
    with quiet():
        new = copies(trainer, tmp_path).make()
    assert new.model[3].bias.tolist() == [7.0] * 10
    assert new.model[3].bias is not trainer.model[3].bias


def test_a_method_that_was_assigned_to_the_object_is_refused(tmp_path: Path) -> None:
    trainer: Any = objects(tmp_path / "run")
    trainer.compute_loss = lambda model, inputs: trainer.model(inputs[0]).sum()
    with pytest.raises(ConfigError, match="compute_loss was assigned to the object"):
        copies(trainer, tmp_path)


def test_a_subclass_with_its_own_arguments_is_copied(tmp_path: Path) -> None:
    class Own(Trainer):
        def __init__(self, weight: float, *arguments: Any) -> None:
            self.weight = weight
            super().__init__(*arguments)

    plain = objects(tmp_path / "run")
    with quiet():
        new = copies(Own(3.0, plain.model, plain.config, plain.train_dataset), tmp_path).make().trainer
    assert new.weight == 3.0
    assert new.config.output_dir != plain.config.output_dir
