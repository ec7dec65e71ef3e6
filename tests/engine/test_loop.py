"""The loop: the order of calls, what `iter` is when, and what happens on failures."""

import gc
import logging
import weakref
from typing import Any

import pytest

from trainwright.base.errors import ConfigError, ConfigTypeError
from trainwright.engine.loop import TrainerBase
from trainwright.events import get_event_storage, has_event_storage
from trainwright.hooks import Callback, CallbackHook, EvalHook, HookBase
from trainwright.hooks.base import SLOTS

MOMENTS = ("before_train", "before_step", "after_step", "after_train")


def recorder(calls: list[str], name: str = "") -> HookBase:
    """A hook that records the moments at which it is called, with the iteration."""
    notes = {m: lambda trainer, m=m: calls.append(f"{name}{m}@{trainer.iter}") for m in MOMENTS}
    return CallbackHook(**notes)


class Trainer(TrainerBase):
    def __init__(self, calls: list[str], fails_at: int | None = None) -> None:
        super().__init__()
        self.calls, self.fails_at = calls, fails_at

    def run_step(self) -> None:
        self.calls.append(f"run_step@{self.iter}")
        get_event_storage().put_scalar("x", float(self.iter))
        if self.iter == self.fails_at:
            raise ZeroDivisionError("the step")


def test_the_order_of_calls_and_the_iteration_in_each() -> None:
    calls: list[str] = []
    trainer = Trainer(calls)
    trainer.register_hooks([recorder(calls, "a."), None, recorder(calls, "b.")])
    trainer.train(3, 5)
    steps = [
        [f"a.before_step@{i}", f"b.before_step@{i}", f"run_step@{i}", f"a.after_step@{i}", f"b.after_step@{i}"]
        for i in (3, 4)
    ]
    assert calls == [
        "a.before_train@3", "b.before_train@3", *steps[0], *steps[1], "a.after_train@5", "b.after_train@5",
    ]  # fmt: skip


def named(calls: list[str], name: str, slot: str | None = None) -> HookBase:
    hook = CallbackHook(after_step=lambda trainer: calls.append(name))
    hook.slot = slot
    return hook


def test_hooks_run_in_the_order_of_their_slots_and_within_one_in_that_of_registration() -> None:
    calls: list[str] = []
    trainer = Trainer([])
    trainer.register_hooks([named(calls, slot, slot) for slot in reversed(SLOTS)])
    trainer.register_hooks([named(calls, f"{slot} again", slot) for slot in SLOTS])
    trainer.train(0, 1)
    assert calls == [name for slot in SLOTS for name in (slot, f"{slot} again")]


def test_a_hook_without_a_slot_runs_behind_all_that_were_registered_before_it() -> None:
    calls: list[str] = []
    trainer = Trainer([])
    trainer.register_hooks([named(calls, "a", "step"), named(calls, "b"), named(calls, "c", "show")])
    trainer.register_hooks([named(calls, "d"), named(calls, "e", "evaluate"), named(calls, "f")])
    trainer.train(0, 1)
    assert calls == ["a", "b", "e", "c", "d", "f"]


def test_an_unknown_slot_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"CallbackHook.slot: got 'last'; it must be one of prepare, .*, stop"):
        Trainer([]).register_hooks([named([], "a", "last")])


def test_iterations_done_is_where_a_checkpoint_taken_now_goes_on() -> None:
    seen: list[tuple[str, int]] = []
    calls = {m: lambda t, m=m: seen.append((m, t.iterations_done)) for m in MOMENTS}
    trainer = Trainer([])
    trainer.register_hooks([CallbackHook(**calls)])
    trainer.train(3, 5)
    steps = [("before_step", 3), ("after_step", 4), ("before_step", 4), ("after_step", 5)]
    assert seen == [("before_train", 3), *steps, ("after_train", 5)]
    assert (trainer.iter, trainer.start_iter, trainer.max_iter, trainer.storage.iter) == (5, 3, 5, 5)


def test_a_failure_runs_after_train_and_is_raised_with_iter_where_it_failed(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[str] = []
    trainer = Trainer(calls, fails_at=2)
    trainer.register_hooks([recorder(calls)])
    with pytest.raises(ZeroDivisionError, match="the step"), caplog.at_level(logging.ERROR):
        trainer.train(0, 4)
    assert trainer.iter == 2
    assert calls[-2:] == ["run_step@2", "after_train@2"]
    assert "Training failed in iteration 3" in caplog.text


@pytest.mark.parametrize(
    ("moment", "raised", "fails_at", "expected", "last"),
    [
        ("after_train", KeyError, 0, ZeroDivisionError, "after_train@0"),  # the first error is not hidden
        ("after_train", KeyError, None, KeyError, "after_train@1"),
        ("before_step", KeyboardInterrupt, None, KeyboardInterrupt, "after_train@0"),
    ],
)
def test_after_train_of_the_other_hooks_runs_whatever_one_hook_raises(
    moment: str, raised: type[BaseException], fails_at: int | None, expected: type[BaseException], last: str
) -> None:
    def fail(trainer: object) -> None:
        raise raised

    calls: list[str] = []
    trainer = Trainer(calls) if fails_at is None else Trainer(calls, fails_at=fails_at)
    trainer.register_hooks([CallbackHook(**{moment: fail}), recorder(calls)])
    with pytest.raises(expected):
        trainer.train(0, 1)
    assert calls[-1] == last


def test_a_stop_iteration_of_a_hook_says_where_it_comes_from() -> None:
    trainer = Trainer([])
    trainer.register_hooks([CallbackHook(after_step=lambda trainer: next(iter([])))])
    with pytest.raises(RuntimeError, match="StopIteration") as caught:
        trainer.train(0, 2)
    assert any("next() on an iterator that has ended" in note for note in caught.value.__notes__)


def test_the_storage_is_current_in_a_training_and_gone_after_it() -> None:
    trainer = Trainer([], fails_at=1)
    with pytest.raises(ZeroDivisionError):
        trainer.train(0, 2)
    assert not has_event_storage()
    assert trainer.storage.history("x").values() == [(0.0, 0), (1.0, 1)]


def test_a_users_own_after_step_decides() -> None:
    calls: list[str] = []

    class Own(Trainer):
        def after_step(self) -> None:
            calls.append("own")
            super().after_step()

    trainer = Own(calls)
    trainer.register_hooks([recorder(calls)])
    trainer.train(0, 1)
    assert calls[-3:] == ["own", "after_step@0", "after_train@1"]


def test_nothing_to_train_says_so_and_calls_no_hook(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[str] = []
    trainer = Trainer(calls)
    trainer.register_hooks([recorder(calls)])
    with caplog.at_level(logging.INFO):
        trainer.train(5, 5)
    assert calls == []
    assert "5 of 5" in caplog.text


def test_something_that_is_no_hook_is_refused() -> None:
    with pytest.raises(ConfigTypeError, match="HookBase"):
        Trainer([]).register_hooks([print])  # type: ignore[list-item]
    with pytest.raises(ConfigTypeError, match=r"pass an object: HookBase\(\.\.\.\)"):
        Trainer([]).register_hooks([HookBase])  # type: ignore[list-item]
    with pytest.raises(ConfigTypeError, match=r"pass a list: \[CallbackHook"):
        Trainer([]).register_hooks(recorder([]))  # type: ignore[arg-type]
    with pytest.raises(ConfigTypeError, match="add_callback"):
        Trainer([]).register_hooks([Callback()])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("moment", "call", "error"),
    [
        ("after_train", lambda trainer: trainer.train(2, 4), "train.. was called while this trainer trains"),
        ("before_step", lambda trainer: trainer.register_hooks([HookBase()]), "Register it before train"),
    ],
)
def test_a_hook_neither_trains_again_nor_adds_a_hook_to_steps_that_have_begun(
    moment: str, call: Any, error: str
) -> None:
    trainer = Trainer([])
    trainer.register_hooks([CallbackHook(**{moment: call})])
    for _ in range(2):  # the second begins like the first
        with pytest.raises(RuntimeError if moment == "after_train" else ConfigError, match=error):
            trainer.train(0, 2)


def test_a_trainer_is_freed_without_the_garbage_collector() -> None:
    trainer = Trainer([])
    trainer.register_hooks([recorder([])])
    trainer.train(0, 2)
    ghost = weakref.ref(trainer)
    gc.disable()
    try:
        del trainer
        assert ghost() is None
    finally:
        gc.enable()


def test_a_trainer_without_a_step_says_what_is_missing() -> None:
    with pytest.raises(NotImplementedError, match="run_step"):
        TrainerBase().train(0, 1)


@pytest.mark.parametrize(
    ("later", "is_shown"),
    [(RuntimeError("gloo: Connection closed by peer"), False), (ValueError("of a hook"), True)],
)
def test_a_lost_process_fails_a_save_in_flight_without_a_second_traceback(
    later: Exception, is_shown: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(trainer: Any) -> None:
        raise later

    class Loses(TrainerBase):
        def run_step(self) -> None:
            raise RuntimeError("gloo: Connection closed by peer")

    trainer = Loses()
    trainer.register_hooks([CallbackHook(after_train=fail)])
    with pytest.raises(RuntimeError, match="Connection closed"):
        trainer.train(0, 1)
    assert ("after_train failed too" in caplog.text) == is_shown


@pytest.mark.parametrize("moment", ["after_step", "after_train"])
@pytest.mark.parametrize(
    ("read", "note"),
    [
        (
            lambda trainer: trainer.storage.latest()["loss"],
            "storage.latest() has no 'loss' now. Did you mean 'total_loss'?",
        ),
        (lambda trainer: trainer.storage.latest()["total_los"], "Did you mean 'total_loss'?"),
        (lambda trainer: trainer.last_eval_results["Acc@1"], "no 'Acc@1'. Nothing has been evaluated yet."),
        (lambda trainer: {"latest()": 1}["loss"], ""),
        (lambda trainer: (trainer.storage.latest(), {}["loss"]), ""),
    ],
)
def test_a_missing_name_of_values_or_results_is_answered_in_a_training(moment: str, read: Any, note: str) -> None:
    trainer = Trainer([])
    put = CallbackHook(after_step=lambda trainer: trainer.storage.put_scalar("total_loss", 1.0))
    trainer.register_hooks([put, CallbackHook(**{moment: read})])
    with pytest.raises(KeyError) as caught:
        trainer.train(0, 2)
    notes = getattr(caught.value, "__notes__", [])
    assert [note in one for one in notes] == ([True] if note else [])
    assert type(caught.value) is KeyError
    assert type(trainer.storage.latest()) is type(trainer.last_eval_results) is dict


def test_a_result_of_another_name_is_answered_after_an_evaluation() -> None:
    trainer = Trainer([])
    read = CallbackHook(after_step=lambda trainer: trainer.last_eval_results["acuracy"])
    trainer.register_hooks([EvalHook(1, lambda: {"accuracy": 1.0}), read])
    with pytest.raises(KeyError) as caught:
        trainer.train(0, 2)
    assert "Did you mean 'accuracy'?" in caught.value.__notes__[0]
