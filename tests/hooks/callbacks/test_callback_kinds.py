"""The callbacks that are there: early stopping, checkpoints, TensorBoard, printed lines, progress bars."""

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.tensorboard import SummaryWriter

from trainwright import hooks
from trainwright.checkpoint import Checkpointer
from trainwright.config.errors import ConfigError, ConfigKeyError
from trainwright.engine.loop import TrainerBase
from trainwright.engine.state import TrainingState
from trainwright.events.writers.console import live_bars
from trainwright.hooks import (
    CallbackList,
    EarlyStoppingCallback,
    EvalHook,
    Logs,
    ModelCheckpointCallback,
    PeriodicCheckpointer,
    PrintCallback,
    ProgressBarCallback,
    RunCallbacks,
    TensorBoardCallback,
    TrainerControl,
)

STEPS = 3  # batches of an epoch
ALWAYS_BETTER = [0.1 * n for n in range(1, 30)]


class Trainer(TrainerBase):
    """The evaluation after epoch n gives ``accuracy`` ``scores[n - 1]``; saves after every iteration."""

    def __init__(self, folder: Path, *callbacks: Any, scores: list[float], fails_at: int | None = None) -> None:
        super().__init__()
        self.scores = scores
        self.fails_at = fails_at
        self.model = nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.25)
        self.progress = TrainingState(self)
        self.checkpointer = Checkpointer(self.model, folder, asynchronous=False, progress=self.progress)
        self.bridge = RunCallbacks(CallbackList(callbacks), steps_per_epoch=STEPS)
        evaluate = self.bridge.evaluating(self.evaluate)
        self.register_hooks([EvalHook(STEPS, evaluate), self.bridge, PeriodicCheckpointer(self.checkpointer, 1)])

    def evaluate(self) -> dict[str, float]:
        for _ in self.bridge.eval_batches(["a", "b"]):
            self.bridge.record({"eval_step_loss": torch.tensor(0.5)})
        return {"loss": 0.25, "accuracy": self.scores[self.iterations_done // STEPS - 1]}

    def _before_first_step(self) -> None:
        self.progress.restore()

    def run_step(self) -> None:
        if self.iter == self.fails_at:
            raise ZeroDivisionError
        self.storage.put_scalar("total_loss", torch.tensor(self.iter + 1.0))


def stopper(monitor: str = "eval_epoch_metric", **how: Any) -> EarlyStoppingCallback:
    return EarlyStoppingCallback(TrainerControl(), monitor, **how)


def epochs_until_stop(callback: EarlyStoppingCallback, values: list[float]) -> int | None:
    """Show it the values, one for each epoch; after which epoch it stops."""
    logs = Logs()
    callback.on_train_begin(logs)
    for epoch, value in enumerate(values, start=1):
        logs[callback.monitor] = value
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
        ({"patience": 2}, [0.1, 0.2, 0.2, 0.3, 0.3, 0.3], 6),  # better in between: counts anew
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


def test_an_epoch_that_ends_twice_counts_once() -> None:
    # A run that max_steps ended within epoch 2 is extended, and ends epoch 2 again, at its last step.
    callback = stopper(patience=2)
    logs = Logs()
    callback.on_train_begin(logs)
    for epoch, value in [(1, 0.5), (2, 0.4), (2, 0.4)]:
        logs[callback.monitor] = value
        callback.on_eval_end(logs)
        callback.on_epoch_end(epoch, logs)
        resumed = stopper(patience=2)
        resumed.load_state_dict(callback.state_dict())
        callback = resumed
    assert (callback.wait, callback.trainercontrol.should_training_stop) == (1, False)


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


def test_a_misspelt_monitor_is_an_error_at_the_first_evaluation(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, stopper("eval_acuracy"), scores=ALWAYS_BETTER)
    with pytest.raises(ConfigKeyError, match=r"'eval_acuracy'.*Allowed: .*eval_accuracy, eval_epoch_loss"):
        trainer.train(0, 9)
    assert trainer.iter == STEPS - 1


def test_a_misspelt_monitor_of_training_is_an_error_at_the_first_epochs_end() -> None:
    with pytest.raises(ConfigKeyError, match=r"'epoch_los'.*epoch_loss"):
        stopper("epoch_los", mode="min").on_epoch_end(1, Logs(epoch_loss=1.0))


def test_an_epoch_without_evaluation_does_not_count(caplog: pytest.LogCaptureFixture) -> None:
    callback = stopper(patience=1)
    for epoch in range(1, 5):
        callback.on_epoch_end(epoch, Logs(eval_epoch_metric=0.5))
    assert callback.wait == 0
    callback.on_train_end(Logs())
    assert "had no values" in caplog.text


def test_a_new_training_begins_anew() -> None:
    callback = stopper(patience=1)
    epochs_until_stop(callback, [0.5, 0.5])
    callback.on_train_begin(Logs())
    assert (callback.best, callback.wait, callback.stopped_epoch) == (None, 0, None)


# The best is that of epoch 2, so with patience 2 the training ends after epoch 4.
SCORES = [0.1, 0.5, 0.4, 0.3, 0.9, 0.9, 0.9]


def test_the_training_stops(tmp_path: Path) -> None:
    callback = stopper(patience=2)
    trainer = Trainer(tmp_path, callback, scores=SCORES)
    assert trainer.train(0, 7 * STEPS) == {"loss": 0.25, "accuracy": 0.3}
    assert (trainer.iter, callback.stopped_epoch, callback.best) == (4 * STEPS, 4, 0.5)
    assert (tmp_path / "model_final").exists()


@pytest.mark.parametrize("fails_at", range(1, 4 * STEPS))
def test_a_resumed_training_stops_where_the_uninterrupted_one_does(tmp_path: Path, fails_at: int) -> None:
    first = Trainer(tmp_path, stopper(patience=2), scores=SCORES, fails_at=fails_at)
    with pytest.raises(ZeroDivisionError):
        first.train(0, 7 * STEPS)
    callback = stopper(patience=2)
    second = Trainer(tmp_path, callback, scores=SCORES)
    second.checkpointer.resume_or_load("", resume=True)
    assert second.start_iter == fails_at
    second.train(second.start_iter, 7 * STEPS)
    assert (second.iter, callback.stopped_epoch, callback.best, callback.wait) == (4 * STEPS, 4, 0.5, 2)


def resume_final(folder: Path, **how: Any) -> Trainer:
    trainer = Trainer(folder, stopper(**how), scores=SCORES)
    trainer.checkpointer.load(folder / "model_final")
    trainer.train(trainer.start_iter, 7 * STEPS)
    return trainer


def test_a_stopped_run_stays_stopped_and_more_patience_lets_it_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Trainer(tmp_path, stopper(patience=2), scores=SCORES).train(0, 7 * STEPS)
    with caplog.at_level(logging.INFO):
        assert resume_final(tmp_path, patience=2).iter == 4 * STEPS
    assert "Nothing to train" in caplog.text
    assert resume_final(tmp_path, patience=4).iter == 7 * STEPS


def test_another_monitor_begins_anew(caplog: pytest.LogCaptureFixture) -> None:
    before = stopper(patience=2)
    epochs_until_stop(before, [0.5, 0.5, 0.5])
    now = stopper("eval_loss", mode="min")
    now.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert (now.best, now.wait) == (None, 0)
    assert "eval_epoch_metric, now eval_loss" in caplog.text


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
    Trainer(tmp_path / "own", callback, scores=ALWAYS_BETTER).train(0, 8)
    assert saved(tmp_path / "mine") == names


def test_a_saved_checkpoint_is_the_whole_run(tmp_path: Path) -> None:
    callbacks = [stopper(patience=2), ModelCheckpointCallback(None, tmp_path / "mine", every_n_epoch=3)]
    Trainer(tmp_path / "own", *callbacks, scores=SCORES).train(0, 7 * STEPS)
    resumed = stopper(patience=2)
    trainer = Trainer(tmp_path / "other", resumed, scores=SCORES)
    trainer.checkpointer.load(tmp_path / "mine" / "model_0000008")
    trainer.train(trainer.start_iter, 7 * STEPS)
    assert (trainer.start_iter, trainer.iter, resumed.stopped_epoch) == (9, 4 * STEPS, 4)


def test_the_default_folder_is_the_runs_own(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, scores=ALWAYS_BETTER)
    trainer._hooks.pop()  # no other saves
    trainer.bridge.callbacks.add_callback(ModelCheckpointCallback(TrainerControl(), every_n_epoch=1))
    trainer.train(0, 6)
    assert saved(tmp_path) == ["model_0000002", "model_0000005"]


@pytest.mark.parametrize("periods", [{}, {"every_n_epoch": 1, "every_n_iteration": 1}, {"every_n_epoch": 0},
                                     {"every_n_iteration": 1.5}, {"every_n_epoch": -2}])  # fmt: skip
def test_one_period_must_be_given(periods: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"every_n_epoch=.*every_n_iteration=.*one of the two"):
        ModelCheckpointCallback(TrainerControl(), **periods)


def events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder))
    read.Reload()
    return {tag: [(e.step, e.value) for e in read.Scalars(tag)] for tag in read.Tags()["scalars"]}


def test_tensorboard_has_every_step_also_over_a_resume(tmp_path: Path) -> None:
    given: list[dict[str, Any]] = []

    def writer(**how: Any) -> SummaryWriter:
        given.append(how)
        # A folder each: files of one second and one process are not read in the order of their writing.
        return SummaryWriter(**{**how, "log_dir": str(tmp_path / f"logs{len(given)}")})

    first = Trainer(tmp_path, TensorBoardCallback(writer), scores=ALWAYS_BETTER, fails_at=4)
    with pytest.raises(ZeroDivisionError):
        first.train(0, 6)
    second = Trainer(tmp_path, TensorBoardCallback(writer), scores=ALWAYS_BETTER)
    second.checkpointer.load(tmp_path / "model_0000003")
    second.train(second.start_iter, 6)
    # What a killed run has written beyond the checkpoint is hidden.
    assert given == [{"log_dir": None, "comment": ""}, {"log_dir": None, "comment": "", "purge_step": 5}]
    before, after = events(tmp_path / "logs1"), events(tmp_path / "logs2")
    found = {tag: before[tag] + after[tag] for tag in before}
    assert found["step_loss"] == [(n, float(n)) for n in range(1, 7)]
    assert found["epoch_loss"] == [(1, 1.0), (2, 1.5), (3, 2.0), (4, 4.0), (5, 4.5), (6, 5.0)]
    assert found["lr"] == [(n, 0.25) for n in range(1, 7)]
    assert found["eval_step_loss"] == [(n, 0.5) for n in range(4)]
    assert found["eval_epoch_metric"] == [(1, pytest.approx(0.1)), (3, pytest.approx(0.2))]
    assert found["eval_epoch_loss"] == [(1, 0.25), (3, 0.25)]


def test_the_constructor_that_is_given_is_used_and_closed(tmp_path: Path) -> None:
    made: list[dict[str, Any]] = []

    class Writer(SummaryWriter):
        def __init__(self, **given: Any) -> None:
            made.append(given)
            super().__init__(str(tmp_path))

        def close(self) -> None:
            made.append({"closed": True})
            super().close()

    Trainer(tmp_path, TensorBoardCallback(Writer, comment="c"), scores=ALWAYS_BETTER).train(0, 3)
    assert made == [{"log_dir": None, "comment": "c"}, {"closed": True}]


def test_printed_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = Trainer(tmp_path, PrintCallback(2, step_frequency=2), scores=[0.5, 0.75])
    trainer.train(0, 6)
    assert capsys.readouterr().out.splitlines() == [
        "epoch=1/2, global_step=2, epoch_loss=1.5",
        "epoch=1/2, eval_global_step=1, eval_epoch_loss=0.25, eval_epoch_metric=0.5",
        "epoch=2/2, global_step=4, epoch_loss=4.0",
        "epoch=2/2, global_step=6, epoch_loss=5.0",
        "epoch=2/2, eval_global_step=3, eval_epoch_loss=0.25, eval_epoch_metric=0.75",
    ]


def test_printed_lines_are_those_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    printer = PrintCallback(2, step_frequency=1)
    printer.on_train_batch_end((), Logs(epoch=1, global_step=1, epoch_loss=torch.tensor(6.5), epoch_metric=0.0))
    printer.on_eval_end(Logs(epoch=1, eval_global_step=1, eval_epoch_loss=6.25, eval_epoch_metric=0.0))
    assert capsys.readouterr().out == (
        "epoch=1/2, global_step=1, epoch_loss=6.5, epoch_metric=0.0\n"
        "epoch=1/2, eval_global_step=0, eval_epoch_loss=6.25, eval_epoch_metric=0.0\n"
    )


def test_a_bar_for_each_epoch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Trainer(tmp_path, ProgressBarCallback(2, range(STEPS)), scores=[0.5, 0.75]).train(0, 6)
    shown = capsys.readouterr().err
    assert "[epoch 1/2] loss=2.000, eval_loss=0.250, eval_metric=0.500: 100%" in shown
    assert "[epoch 2/2] loss=5.000, eval_loss=0.250, eval_metric=0.750: 100%" in shown
    assert "3/3" in shown
    assert "step/s" in shown


def test_a_bar_goes_on_inside_an_epoch_and_is_closed_after_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = Trainer(tmp_path, ProgressBarCallback(2, range(STEPS)), scores=SCORES, fails_at=2)
    with pytest.raises(ZeroDivisionError):
        first.train(0, 6)
    assert not live_bars
    capsys.readouterr()
    second = Trainer(tmp_path, ProgressBarCallback(2, range(STEPS)), scores=SCORES)
    second.checkpointer.load(tmp_path / "model_0000001")
    second.train(second.start_iter, 3)
    assert "2/3" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["TensorBoard", "Print", "ProgressBar"])
def test_the_other_spelling_is_the_same_class(kind: str) -> None:
    assert getattr(hooks, f"{kind}CallBack") is getattr(hooks, f"{kind}Callback")
