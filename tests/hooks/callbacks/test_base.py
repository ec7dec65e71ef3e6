"""Callbacks and lists of them: their methods, adding and removing."""

from typing import Any

import pytest

from tests.hooks.callbacks.conftest import Recorder, SmallTrainer
from trainwright.base.errors import ConfigError, ConfigKeyError, ConfigTypeError
from trainwright.hooks import Callback, CallbackList, HookBase, RunCallbacks, TrainerControl


def test_callbacks_know_model_optimizer_and_control_also_those_that_come_later() -> None:
    early, late = Callback(), Callback()
    trainer = SmallTrainer([early])
    trainer.train(0, 1)
    trainer.callbacks.add_callback(late, singleton=False)
    for callback in (early, late):
        assert callback.model is trainer.model
        assert callback.optimizer is trainer.optimizer
        assert callback.trainercontrol is trainer.bridge.control


def test_a_flag_that_there_is_not_is_refused() -> None:
    with pytest.raises(AttributeError, match=r"trainercontrol.should_stop: .*should_training_stop"):
        TrainerControl().should_stop = True  # type: ignore[attr-defined]
    with pytest.raises(ConfigTypeError, match="register_hooks"):
        CallbackList([HookBase()])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="steps_per_epoch: got 0"):
        RunCallbacks(CallbackList(), steps_per_epoch=0)


class First(Recorder):
    pass


class Second(Recorder):
    pass


def test_a_list_adds_and_takes_out() -> None:
    first, again, second = First(), First(), Second()
    callbacks = CallbackList([first, second])
    callbacks.add_callback(again)
    assert (len(callbacks), callbacks[0], callbacks[1]) == (2, second, again)
    callbacks.add_callback(first, singleton=False)
    assert repr(callbacks) == "CallbackList([Second, First, First])"
    assert callbacks.pop_callback(First) is again
    assert callbacks.pop_callback(first) is first
    assert list(callbacks) == [second]
    with pytest.raises(ConfigKeyError, match=r"First.*which has: Second"):
        callbacks.pop_callback(First)
    with pytest.raises(ConfigTypeError, match=r"Second\(\.\.\.\)"):
        callbacks.add_callback(Second)  # type: ignore[arg-type]
    with pytest.raises(ConfigTypeError, match="must be a Callback"):
        CallbackList([print])  # type: ignore[list-item]
    several = CallbackList([First(), First(), Second(), First()])
    several.add_callback(First())  # takes all of its class out
    assert repr(several) == "CallbackList([Second, First])"


def test_callbacks_that_come_and_go_in_the_middle() -> None:
    guest = Second()

    class Host(First):
        def on_train_batch_begin(self, batch: Any, logs: Any) -> None:
            super().on_train_batch_begin(batch, logs)
            if logs["global_step"] == 1:
                callbacks.add_callback(guest)
            if logs["global_step"] == 3:
                callbacks.pop_callback(self)

    host, last = Host(), Recorder()
    callbacks = CallbackList([host, last])
    SmallTrainer(callbacks).train(0, 6)
    assert guest.calls[0] == "train_batch_end (tensor(2), 'label')"
    assert guest.calls[-1] == "train_end"
    assert host.calls[-1] == "batch_begin [tensor(4), 'label']"  # a call that has begun is finished
    assert len([call for call in last.calls if call.startswith("train_batch_begin")]) == 6  # none was skipped
