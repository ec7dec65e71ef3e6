"""A training whose metric does not improve is stopped: when, in which direction, and over a resume."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from tests.hooks.callbacks.conftest import ALWAYS_BETTER, SCORES, STEPS, SmallTrainer, stopper
from trainwright import Trainer, TrainingConfig
from trainwright.base.errors import ConfigError, ConfigKeyError
from trainwright.hooks import (
    EarlyStoppingCallback,
    Logs,
    TrainerControl,
)


def epochs_until_stop(callback: EarlyStoppingCallback, values: list[float]) -> int | None:
    """Show it the values, one for each epoch; after which epoch it stops."""
    logs = Logs()
    callback.on_train_begin(logs)
    for epoch, value in enumerate(values, start=1):
        logs.update({callback.monitor: value, "epoch": epoch, "global_step": epoch * STEPS})
        callback.on_eval_end(logs)
        callback.on_epoch_end(epoch, logs)
        assert callback.trainercontrol is not None
        if callback.trainercontrol.should_training_stop:
            assert callback.stopped_epoch == epoch
            return epoch
    return None


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("how", "values", "epoch"),
    [
        ({"patience": 2}, [0.1, 0.2, 0.2, 0.1], 4),
        ({"patience": 2}, [0.1, 0.2, 0.2, 0.3, 0.3, 0.3], 6),  # better in between: counts from 0 again
        ({"patience": 2}, [0.0, 0.0, 0.0], 3),  # zero is a value
        ({"patience": 0}, [0.1, 0.2, 0.2], 3),
        ({"patience": 1}, [0.1, 0.2, 0.2], 3),
        ({"patience": 1}, ALWAYS_BETTER, None),
        ({"patience": 2, "mode": "min"}, [0.3, 0.2, 0.2, 0.3], 4),
        ({"patience": 1, "min_delta": 0.1}, [0.1, 0.15], 2),
        ({"patience": 1, "min_delta": 0.1, "mode": "min"}, [0.3, 0.1, 0.05], 3),
        ({"patience": 2, "baseline": 0.5}, [0.1, 0.2, 0.6], 2),  # better, but not than the baseline
        ({"patience": 2, "baseline": 0.5}, [0.1, 0.6, 0.7], None),
        ({"patience": 2}, [NAN, NAN], 2),
        ({"patience": 2}, [0.1, NAN, 0.2, INF, NAN], 5),  # neither NaN nor infinity is ever better
        ({"patience": 2, "mode": "min"}, [-INF, 0.2, 0.1], None),
    ],
)
def test_when_it_stops(how: dict[str, Any], values: list[float], epoch: int | None) -> None:
    assert epochs_until_stop(stopper(**how), values) == epoch


@pytest.mark.parametrize(
    ("ends", "wait"),
    [
        # max_steps ended the run between two evaluations; the longer run continues to the next one that is due.
        ([(3, 0.5, False), (5, 0.4, True), (6, 0.4, False)], 1),
        ([(3, 0.5, False), (6, 0.4, False), (9, 0.4, False)], 2),  # the last evaluation was due
        ([(3, 0.5, False), (5, 0.4, True), (5, 0.4, False), (6, 0.4, False)], 1),  # resumed at its end in between
        ([(3, 0.5, False), (6, 0.4, False), (6, 0.4, False), (9, 0.6, False)], 0),
    ],
)
def test_the_extra_evaluation_of_a_run_that_is_extended_counts_once(
    ends: list[tuple[int, float, bool]], wait: int
) -> None:
    callback = stopper(patience=9)
    logs = Logs()
    callback.on_train_begin(logs)
    for step, value, is_extra in ends:
        logs.update({callback.monitor: value, "epoch": 1, "global_step": step})
        assert callback.trainercontrol is not None
        callback.trainercontrol.is_extra_evaluation = is_extra
        callback.on_eval_end(logs)
        resumed = stopper(patience=9)
        resumed.load_state_dict(callback.state_dict())
        callback = resumed
    assert callback.wait == wait


def test_an_epoch_that_ends_twice_counts_once() -> None:
    callback = stopper("epoch_loss", patience=2, mode="min")
    for epoch, value in [(1, 0.5), (2, 0.6), (2, 0.6)]:
        callback.on_epoch_end(epoch, Logs(epoch_loss=value))
        resumed = stopper("epoch_loss", patience=2, mode="min")
        resumed.load_state_dict(callback.state_dict())
        callback = resumed
    assert (callback.wait, callback.trainercontrol.should_training_stop) == (1, False)


@pytest.mark.parametrize(("patience", "stop"), [(2, 15), (3, 20), (30, 100)])
def test_patience_counts_evaluations_within_an_epoch(patience: int, stop: int, tmp_path: Path) -> None:
    inputs = torch.randn(100, 4, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(inputs, (inputs.sum(1) > 0).long())
    config = TrainingConfig(
        output_dir=tmp_path, num_epochs=1, batch_size=1, learning_rate=1e-12, eval_strategy="step", eval_steps=5,
        early_stopping={"monitor": "eval_accuracy", "patience": patience, "mode": "max"}, progress_bar=False,
    )  # fmt: skip
    trainer = Trainer(torch.nn.Linear(4, 2), config, data, data)
    trainer.train()
    assert trainer.state.global_step == stop


@pytest.mark.parametrize(
    ("monitor", "mode"),
    [("epoch_loss", "min"), ("eval_cer", "min"), ("evaluation/accuracy", "max"), ("eval_F1", "max")],
)
def test_auto_knows_which_way_is_better(monitor: str, mode: str) -> None:
    assert stopper(monitor, mode="auto").mode == mode


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"mode": "auto"}, r"got 'auto'.*'eval_epoch_metric'"),
        ({"mode": "best"}, r"mode: got 'best'.*'max', 'min' or 'auto'"),
        ({"min_delta": -0.1}, r"min_delta: got -0\.1"),
        ({"min_delta": NAN}, r"min_delta: got nan"),
        ({"patience": -1}, r"patience: got -1"),
        ({"patience": 1.5}, r"patience: got 1\.5"),
        ({"monitor": ""}, r"monitor: got ''"),
    ],
)
def test_impossible_arguments_are_refused(how: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        stopper(**how)


def test_a_misspelt_monitor_is_an_error_at_the_first_evaluation() -> None:
    trainer = SmallTrainer([stopper("eval_acuracy")])
    with pytest.raises(ConfigKeyError, match=r"'eval_acuracy'.*Allowed: .*eval_accuracy, eval_epoch_loss"):
        trainer.train(0, 9)
    assert trainer.iter == STEPS - 1
    with pytest.raises(ConfigKeyError, match=r"'epoch_los'.*epoch_loss"):  # of the training: at its first epoch's end
        stopper("epoch_los", mode="min").on_epoch_end(1, Logs(epoch_loss=1.0))


def test_an_epoch_without_evaluation_does_not_count_results_of_evaluations(caplog: pytest.LogCaptureFixture) -> None:
    callback = stopper(patience=1)
    for epoch in range(1, 5):
        callback.on_epoch_end(epoch, Logs(eval_epoch_metric=0.5))
    assert callback.wait == 0
    callback.on_train_end(Logs())
    assert "had no values" in caplog.text


@pytest.mark.exhaustive(every=4)
@pytest.mark.parametrize("fails_at", range(1, 4 * STEPS))
def test_a_resumed_training_stops_where_the_uninterrupted_one_does(tmp_path: Path, fails_at: int) -> None:
    first = SmallTrainer([stopper(patience=2)], tmp_path, scores=SCORES, saves=True, fails_at=fails_at)
    with pytest.raises(ZeroDivisionError):
        first.train(0, 7 * STEPS)
    callback = stopper(patience=2)
    second = SmallTrainer([callback], tmp_path, scores=SCORES, saves=True)
    second.checkpointer.resume_or_load("", resume=True)
    assert second.start_iter == fails_at
    second.train(second.start_iter, 7 * STEPS)
    assert (second.iter, callback.stopped_epoch, callback.best, callback.wait) == (4 * STEPS, 4, 0.5, 2)


def test_another_monitor_or_training_starts_with_no_best_value(caplog: pytest.LogCaptureFixture) -> None:
    before = stopper(patience=2)
    epochs_until_stop(before, [0.5, 0.5, 0.5])
    now = stopper("eval_loss", mode="min")
    now.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert (now.best, now.wait) == (None, 0)
    assert "eval_epoch_metric, now eval_loss" in caplog.text
    before.on_train_begin(Logs())  # a new training
    assert (before.best, before.wait, before.stopped_epoch) == (None, 0, None)


def test_the_first_line_has_what_counts_as_better(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "trainwright")
    for min_delta, text in ((0.0, "without a higher accuracy;"), (0.01, "accuracy (by more than min_delta=0.01);")):
        caplog.clear()
        callback = EarlyStoppingCallback(TrainerControl(), "eval_accuracy", min_delta=min_delta, mode="max")
        logs = Logs()
        callback.on_train_begin(logs)
        logs.update({"eval_accuracy": 0.5, "epoch": 1, "global_step": 3})
        callback.on_eval_end(logs)
        assert text.replace("accuracy", "eval_accuracy") in caplog.text
