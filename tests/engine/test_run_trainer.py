"""``check`` is a method of both trainers, and refuses what it cannot copy."""

from pathlib import Path
from typing import Any

import pytest

from tests.inspect.check.seeded_bugs import config_files
from trainwright import DefaultTrainer, Trainer
from trainwright.config import ConfigError


def test_both_apis_have_it() -> None:
    assert Trainer.check is DefaultTrainer.check


def test_a_replaced_inner_trainer_is_refused(tmp_path: Path) -> None:
    trainer: Any = config_files(tmp_path / "run")
    trainer._trainer = object()
    with pytest.raises(ConfigError, match=r"trainer\._trainer was replaced"):
        trainer.check()
