"""Checkpoints every n epochs or batches."""

from pathlib import Path
from typing import Any

import pytest

from tests.hooks.callbacks.conftest import SCORES, STEPS, SmallTrainer, stopper
from trainwright.base.errors import ConfigError
from trainwright.hooks import (
    ModelCheckpointCallback,
    TrainerControl,
)


def saved(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.glob("model_*"))


@pytest.mark.parametrize(
    ("how", "names"),
    [
        ({"every_n_epoch": 1}, ["model_0000002", "model_0000005", "model_0000007"]),
        ({"every_n_epoch": 2}, ["model_0000005"]),
        ({"every_n_iteration": 3}, ["model_0000002", "model_0000005"]),
        ({"every_n_iteration": 4}, ["model_0000003", "model_0000007"]),
    ],
)
def test_checkpoints_are_saved_in_the_folder(tmp_path: Path, how: dict[str, int], names: list[str]) -> None:
    callback = ModelCheckpointCallback(TrainerControl(), tmp_path / "mine", **how)
    SmallTrainer([callback], tmp_path / "own").train(0, 8)
    assert saved(tmp_path / "mine") == names


def test_a_saved_checkpoint_is_the_whole_run(tmp_path: Path) -> None:
    callbacks = [stopper(patience=2), ModelCheckpointCallback(None, tmp_path / "mine", every_n_epoch=3)]
    SmallTrainer(callbacks, tmp_path / "own", scores=SCORES).train(0, 7 * STEPS)
    resumed = stopper(patience=2)
    trainer = SmallTrainer([resumed], tmp_path / "other", scores=SCORES)
    trainer.checkpointer.load(tmp_path / "mine" / "model_0000008")
    trainer.train(trainer.start_iter, 7 * STEPS)
    assert (trainer.start_iter, trainer.iter, resumed.stopped_epoch) == (9, 4 * STEPS, 4)


@pytest.mark.parametrize("periods", [{}, {"every_n_epoch": 1, "every_n_iteration": 1}, {"every_n_epoch": 0},
                                     {"every_n_iteration": 1.5}, {"every_n_epoch": -2}])  # fmt: skip
def test_one_period_must_be_given(periods: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"every_n_epoch=.*every_n_iteration=.*one of the two"):
        ModelCheckpointCallback(TrainerControl(), **periods)
