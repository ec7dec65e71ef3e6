"""The position of a run in its epochs, and its rate."""

import gc
import logging
import re
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.spent_time import CLOCK, spend
from tests.toys import file_config
from trainwright import Trainer, TrainingConfig
from trainwright.checkpoint import Checkpointer
from trainwright.engine import DefaultTrainer
from trainwright.events.phases import activity, importing
from trainwright.events.rate import Position, Rate, speed


def test_the_last_epoch_may_be_shorter() -> None:
    at = Position(230, 250, per_epoch=100)
    assert (at.epoch, at.num_epochs, at.of_epoch) == (3, 3, (30, 50))
    assert Position(100, 250, per_epoch=100).of_epoch == (100, 100)
    assert Position(7, 10).of_epoch == (7, 10)


def test_an_iteration_belongs_to_the_epoch_of_its_first_sample() -> None:
    samples, batch, epochs = 1437, 32, 40
    total = -(-samples * epochs // batch)
    for done in (1, 44, 45, 46, 89, 90, 1752, 1753, total):
        at = Position(done, total, per_epoch=Fraction(samples, batch))
        first_sample = (done - 1) * batch
        assert at.epoch == first_sample // samples + 1
        before = sum(n * batch // samples < at.epoch - 1 for n in range(total))
        assert at.of_epoch == (done - before, sum(n * batch // samples == at.epoch - 1 for n in range(total)))
        assert at.num_epochs == epochs


@pytest.fixture
def _all_clocks(clock: None, monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()  # a loader that an earlier test has left would wait for its workers by this clock, forever
    monkeypatch.setattr(time, "monotonic", CLOCK)


@pytest.mark.usefixtures("_all_clocks")
def test_the_rate_is_without_the_first_iteration_and_what_is_no_step() -> None:
    rate = Rate()
    spend(40)
    rate.update(1, is_first=True)
    spend(1)
    rate.update(11)
    with activity("evaluation"):
        spend(100)
        rate.update(11)
        assert rate.left_s(10) == pytest.approx(1)  # the time left does not fall while the steps wait
        with importing():
            spend(50)
    with importing():
        spend(50)
    spend(1)
    rate.update(21)
    assert rate.per_s == pytest.approx(10)
    rate.count("evaluation", 11, 100)
    assert rate.left_s(20) == pytest.approx(2 + 2 * 100)  # after 22 and 33 iterations
    assert rate.left_s(20, with_interruptions=False) == pytest.approx(2)


@pytest.mark.usefixtures("_all_clocks")
def test_one_evaluation_of_a_resumed_run_is_taken_for_the_first_of_this_start() -> None:
    rate = Rate(1000)
    spend(1)
    rate.update(1001, is_first=True)
    spend(1)
    rate.update(1010)
    rate.count("evaluation", 1010, 5)
    assert rate.left_s(20) == pytest.approx(20 / 9 + 2 * 5)


@pytest.mark.usefixtures("_all_clocks")
def test_the_time_left_falls_between_two_slow_steps() -> None:
    rate = Rate()
    for done in (1, 2):
        spend(20)
        rate.update(done)
    assert rate.left_s(3) == 60
    spend(15)
    rate.update(2)
    assert rate.left_s(3) == 45
    assert speed(rate.per_s or 0) == "20.0 s/it"


class Slow(nn.Module):
    """Compiles for 60 s, trains in 0.1 s, evaluates a batch in 2 s."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self._is_compiled = nn.Linear(4, 2), False

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        spend(0 if self._is_compiled else 60)
        self._is_compiled = True
        spend(0.1 if self.training else 2)
        scores = self.layer(x)
        return {"loss": nn.functional.cross_entropy(scores, labels), "logits": scores}


class Columns(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        x, labels = super().__getitem__(index)
        return {"x": x, "labels": labels}


@pytest.mark.usefixtures("_all_clocks")
@pytest.mark.parametrize("api", ["python", "config"])
def test_the_time_left_is_what_the_run_takes(
    api: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    data, test = (Columns(torch.randn(n, 4), torch.randint(2, (n,))) for n in (80, 8))
    save = Checkpointer.save
    monkeypatch.setattr(Checkpointer, "save", lambda *args, **settings: spend(3) or save(*args, **settings))
    if api == "python":
        config = TrainingConfig(
            output_dir=tmp_path, num_epochs=20, batch_size=4, log_steps=20, metrics=None, early_stopping=None,
            progress_bar=False, load_best_model_at_end=False,
        )  # fmt: skip
        trainer: Any = Trainer(Slow(), config, data, test)
    else:
        cfg = file_config(
            tmp_path, Slow, lambda: data, lambda: test, train_epoch=20, train_micro_batch_size=4, log_period=20
        )
        cfg.train.evaluation.eval_period = cfg.train.checkpointer.period = 20
        cfg.train.evaluation.update(eval_metric="eval_loss", eval_mode="min")
        trainer = DefaultTrainer(cfg)
    shown: list[tuple[float, float]] = []

    class Reader(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found = re.search(r"ETA (\d+):(\d+)", record.getMessage())
            if found:
                shown.append((CLOCK.now, 60 * int(found[1]) + int(found[2])))

    reader = Reader()
    logging.getLogger("trainwright").addHandler(reader)
    try:
        with caplog.at_level(logging.INFO):
            trainer.train()
    finally:
        logging.getLogger("trainwright").removeHandler(reader)
    errors = [round(eta / (CLOCK.now - now), 2) for now, eta in shown]
    assert len(shown) >= 18, caplog.text
    assert 0.3 < errors[0] < 1, errors  # one evaluation has been made, and no save
    assert errors[1:-2] == pytest.approx([1] * (len(errors) - 3), abs=0.15), errors
