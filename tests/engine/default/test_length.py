"""The length of a run by its configuration and its data."""

from pathlib import Path

import pytest

from tests.engine.default.test_setup import Loss, config
from trainwright import DefaultTrainer
from trainwright.config import LazyCall


@pytest.mark.parametrize(
    ("given", "warns"),
    [
        ({"train_epoch": 0}, True),
        ({"train_epoch": 0, "train_iter": 10000}, False),
        ({"train_epoch": 1}, False),
        ({}, False),
    ],
    ids=str,
)
def test_no_epochs_warn_where_the_default_number_of_iterations_counts(
    given: dict[str, int], warns: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cfg = config(tmp_path, train_micro_batch_size=4, **given)
    cfg.model = LazyCall(Loss)()
    DefaultTrainer(cfg)
    said = [text for text in caplog.messages if "train_epoch=0" in text]
    assert len(said) == warns
    if warns:
        assert "the default train.train_iter=10000" in said[0]
