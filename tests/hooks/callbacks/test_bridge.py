"""Callbacks on a training: the order of calls, what they are shown, adding and taking out, their wishes."""

from pathlib import Path
from typing import Any

import pytest

from tests.hooks.callbacks.conftest import STEPS, Recorder, SmallTrainer
from tests.ranks import on_ranks
from trainwright.base.dist import get_rank
from trainwright.base.errors import ConfigError
from trainwright.engine.loop import TrainerBase
from trainwright.hooks import Callback, CallbackList, Logs, RunCallbacks, TrainerControl


def batch_calls(numbers: Any) -> list[str]:
    return [
        call
        for n in numbers
        for call in (
            f"train_batch_begin [tensor({n}), 'label']",
            f"batch_begin [tensor({n}), 'label']",
            f"train_batch_end (tensor({n}), 'label')",
            f"batch_end (tensor({n}), 'label')",
        )
    ]


EVALUATION = [
    "eval_begin",
    "eval_batch_begin ['a', 'b']",
    "batch_begin ['a', 'b']",
    "eval_batch_end ('a', 'b')",
    "batch_end ('a', 'b')",
    "eval_end",
]


def test_the_order_of_calls_over_two_epochs_of_three_batches() -> None:
    recorder, both = Recorder(), list[str]()
    SmallTrainer([Recorder("a", both), recorder, Recorder("b", both)]).train(0, 6)
    epochs = [
        ["epoch_begin 1", *batch_calls([1, 2, 3]), *EVALUATION, "epoch_end 1"],
        ["epoch_begin 2", *batch_calls([4, 5, 6]), *EVALUATION, "epoch_end 2"],
    ]
    assert recorder.calls == ["train_begin", *epochs[0], *epochs[1], "train_end"]
    # First in, first called; each finishes a batch before the next.
    assert [call.split()[:2] for call in both[2:8]] == [
        ["a", "epoch_begin"], ["b", "epoch_begin"],
        ["a", "train_batch_begin"], ["a", "batch_begin"], ["b", "train_batch_begin"], ["b", "batch_begin"],
    ]  # fmt: skip


def test_micro_batches_of_a_window_have_their_own_calls() -> None:
    recorder = Recorder()
    SmallTrainer([recorder], window=3).train(0, 2)
    begun = [call for call in recorder.calls if call.startswith(("train_batch", "epoch", "eval_begin"))]
    whole = [call for call in batch_calls([1, 2, 3]) if call.startswith("train")]
    assert begun[:9] == ["epoch_begin 1", *whole, "eval_begin", "epoch_end 1"]


def test_a_training_without_handed_batches_has_one_for_each_iteration() -> None:
    class Bare(TrainerBase):
        def run_step(self) -> None:
            pass

    recorder, trainer = Recorder(), Bare()
    trainer.register_hooks([RunCallbacks(CallbackList([recorder]), steps_per_epoch=2)])
    trainer.train(0, 3)
    assert [c for c in recorder.calls if not c.startswith("batch")] == [
        "train_begin", "epoch_begin 1", *["train_batch_begin ()", "train_batch_end ()"] * 2, "epoch_end 1",
        "epoch_begin 2", "train_batch_begin ()", "train_batch_end ()", "epoch_end 2", "train_end",
    ]  # fmt: skip


def test_after_a_failure_the_epoch_has_no_end_but_the_training_has() -> None:
    recorder = Recorder()
    trainer = SmallTrainer([recorder], fails_at=4)
    with pytest.raises(ZeroDivisionError):
        trainer.train(0, 6)
    assert recorder.calls[-2:] == ["batch_begin [tensor(5), 'label']", "train_end"]
    assert trainer.bridge.control.has_failed


def test_every_callback_has_its_end_even_if_one_fails_there() -> None:
    class Failing(Callback):
        def on_train_end(self, logs: Any) -> None:
            raise ZeroDivisionError

    recorder = Recorder()
    with pytest.raises(ZeroDivisionError):
        SmallTrainer([Failing(), recorder]).train(0, 3)
    assert recorder.calls[-1] == "train_end"


class Wishing(Callback):
    """Sets a flag after a batch."""

    def __init__(self, wish: str, at: int) -> None:
        self.wish, self.at = wish, at

    def on_batch_end(self, batch: Any, logs: Any) -> None:
        if logs["global_step"] == self.at:
            setattr(self.trainercontrol, self.wish, True)


def test_a_stop_inside_an_epoch_ends_the_training_as_any_end_does() -> None:
    recorder = Recorder()
    trainer = SmallTrainer([Wishing("should_training_stop", 4), recorder])
    assert trainer.train(0, 30) == {"loss": 1.0, "accuracy": 0.1}
    assert (trainer.iter, trainer.max_iter) == (4, 30)  # the end that was planned, for a longer training
    assert recorder.calls[-8:] == [*EVALUATION, "epoch_end 2", "train_end"]
    assert not trainer.bridge.control.has_failed


def test_a_stop_at_an_evaluation_does_not_evaluate_twice() -> None:
    trainer = SmallTrainer([Wishing("should_training_stop", 3)])
    trainer.train(0, 30)
    assert (trainer.iter, trainer.num_evaluations) == (3, 1)
    assert trainer.storage.history("accuracy").values() == [(0.1, 2)]  # one row: the final evaluation is this one
    trainer.bridge.evaluating(trainer.evaluate)()
    assert trainer.num_evaluations == 2  # asked for after the training, it is run


def stop_of(ranks: set[int]) -> int:
    """Where a training stops if these processes request it at batch 7; log lines are at 4, 8 …"""
    trainer = SmallTrainer(
        [Wishing("should_training_stop", 7)] if get_rank() in ranks else [],
        is_due=lambda: trainer.iterations_done % 4 == 0,
        steps_per_epoch=None,
    )
    trainer.train(0, 23)
    return trainer.iter


def stops() -> list[int]:
    return [stop_of(ranks) for ranks in ({0, 1}, {1}, set[int]())]


def test_a_stop_of_several_processes_takes_effect_at_the_next_log_line() -> None:
    assert on_ranks(stops) == [[8, 8, 23]] * 2


def test_other_wishes_are_granted_once() -> None:
    calls: list[str] = []
    wishes = ["should_evaluate", "should_log", "should_epoch_stop"]
    how = {name.removeprefix("should_"): (lambda name=name: calls.append(name)) for name in wishes}
    how["end_epoch"] = how.pop("epoch_stop")
    trainer = SmallTrainer([Wishing(wish, at + 1) for at, wish in enumerate(wishes)], **how)
    trainer.train(0, 6)
    assert calls == wishes
    assert trainer.bridge.control == TrainerControl()


@pytest.mark.parametrize("wish", ["should_evaluate", "should_log", "should_epoch_stop", "should_save"])
def test_a_wish_that_cannot_be_granted_is_an_error(wish: str) -> None:
    trainer = SmallTrainer([Wishing(wish, 1)])
    if wish == "should_save":
        del trainer.checkpointer
    with pytest.raises(ConfigError, match=wish):
        trainer.train(0, 6)


class Counting(Callback):
    """Remembers what it was shown, over resumes too."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, float]] = []

    def on_train_batch_end(self, batch: Any, logs: Any) -> None:
        self.seen.append((logs["global_step"], logs["epoch_loss"]))

    def on_epoch_end(self, epochs: int, logs: Any) -> None:
        self.seen.append((epochs, logs["eval_epoch_metric"]))

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = [tuple(pair) for pair in state["seen"]]


@pytest.mark.parametrize("stop_at", [1, 2, 3, 4, 5])
def test_a_callbacks_state_survives_a_resume_anywhere(tmp_path: Path, stop_at: int) -> None:
    whole = Counting()
    SmallTrainer([whole]).train(0, 6)

    first = SmallTrainer([Counting(), Counting(), Wishing("should_save", stop_at)], tmp_path, fails_at=stop_at)
    with pytest.raises(ZeroDivisionError):
        first.train(0, 6)
    resumed, recorder = Counting(), Recorder()
    second = SmallTrainer([resumed, Counting(), recorder], tmp_path)
    second.checkpointer.load(tmp_path / f"model_{stop_at - 1:07d}")
    second.train(second.start_iter, 6)
    assert resumed.seen == whole.seen
    assert second.callbacks[1].seen == whole.seen  # type: ignore[attr-defined]
    assert recorder.calls[:2] == ["train_begin", f"epoch_begin {stop_at // STEPS + 1}"]
    assert (second.bridge.logs["global_step"], second.bridge.logs["eval_global_step"]) == (6, 2)


@pytest.mark.parametrize(("max_iter", "calls"), [(3, ["epoch_end 1"]), (6, ["epoch_begin 2", "epoch_end 2"])])
def test_a_checkpoint_from_before_the_last_evaluation_is_resumed(
    tmp_path: Path, max_iter: int, calls: list[str]
) -> None:
    class SavesBeforeItsLastEvaluation(SmallTrainer):
        def evaluate(self) -> dict[str, float]:
            self.checkpointer.save("model_final", iteration=2)
            return super().evaluate()

        def _is_end_pending(self) -> bool:
            return True

    SavesBeforeItsLastEvaluation([], tmp_path).train(0, 3)
    recorder = Recorder()
    trainer = SavesBeforeItsLastEvaluation([recorder], tmp_path)
    trainer.checkpointer.load(tmp_path / "model_final")
    trainer.train(3, max_iter)
    assert [call for call in recorder.calls if call.startswith("epoch")] == calls


def test_states_without_a_callback_and_callbacks_without_a_state_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    state = CallbackList([Counting()]).state_dict()
    CallbackList([Callback()]).load_state_dict(state)
    assert "does not have: Counting" in caplog.text
    CallbackList([Counting()]).load_state_dict(CallbackList([]).state_dict())
    assert "no state of Counting" in caplog.text


def test_a_method_that_is_never_called_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    class OfAnotherLibrary(Callback):
        def on_step_end(self, batch: Any, logs: Logs) -> None:
            raise AssertionError

    CallbackList([OfAnotherLibrary()])
    assert "OfAnotherLibrary.on_step_end is never called" in caplog.text
    assert "on_train_batch_end" in caplog.text
    caplog.clear()
    CallbackList([Callback()])
    assert not caplog.text
