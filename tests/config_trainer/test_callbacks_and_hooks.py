"""``train.callbacks`` and ``train.hooks``: what is built, the order of the calls, and the errors of wrong lists."""

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from tests.toys import Classifier, file_config, points
from trainwright import DefaultTrainer, LazyCall
from trainwright.config import ConfigError, LazyConfig
from trainwright.hooks import Callback, CallbackList, EarlyStoppingCallback, HookBase

CALLS: list[Any] = []


class Noted(Callback):
    def __init__(self, name: str = "callback", fails_at: int | None = None) -> None:
        self.name, self.fails_at = name, fails_at
        CALLS.append(("built", name))

    def on_train_begin(self, logs: Any) -> None:
        CALLS.append(("begin", self.name))

    def on_train_batch_end(self, batch: Any, logs: Any) -> None:
        CALLS.append(("batch", self.name))
        if logs["global_step"] == self.fails_at:
            raise ZeroDivisionError("of a callback")

    def on_train_end(self, logs: Any) -> None:
        CALLS.append(("failed" if self.trainercontrol.has_failed else "end", self.name))


class Counting(HookBase):
    """Counts the iterations of all resumes."""

    def __init__(self, slot: str | None = None) -> None:
        self.count = 0
        if slot is not None:
            self.slot = slot

    def after_step(self) -> None:
        self.count += 1
        self.trainer.storage.put_scalar("counted", self.count, smoothing_hint=False)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class Unbuildable(Callback):
    def __init__(self) -> None:
        raise ZeroDivisionError("of a constructor")


HOOKS = ("hooks", "hook", "custom_hooks", "build_hooks")
OF_LISTS = [("callback", "callbacks"), ("callbacks", "callbacks"), *((name, "hooks") for name in HOOKS)]


@pytest.fixture(autouse=True)
def _without_calls() -> None:
    CALLS.clear()


def data() -> Any:
    return points(16)


def net() -> Classifier:
    return Classifier((4, 8, 2), seed=0)


def config(folder: Path, **train: Any) -> Any:
    return file_config(folder, net, data, **{"train_micro_batch_size": 4, "train_iter": 4, "log_period": 2, **train})


def test_each_call_is_made_once_and_the_callbacks_run_in_the_order_of_the_list(tmp_path: Path) -> None:
    trainer = DefaultTrainer(config(tmp_path, callbacks=[LazyCall(Noted)(name="a"), LazyCall(Noted)(name="b")]))
    assert isinstance(trainer.callbacks, CallbackList)
    trainer.train()
    batches = [("batch", "a"), ("batch", "b")] * 4
    starts = [(what, name) for what in ("built", "begin") for name in "ab"]
    assert [*starts, *batches, ("end", "a"), ("end", "b")] == CALLS


def test_callbacks_change_no_number_of_a_training(tmp_path: Path) -> None:
    class Drawing(Callback):
        def __init__(self) -> None:
            torch.rand(3)

    with_one, without = (
        DefaultTrainer(config(tmp_path / "a", callbacks=[LazyCall(Drawing)()])),
        DefaultTrainer(config(tmp_path / "b")),
    )
    for trainer in (with_one, without):
        trainer.train()
    for one, other in zip(with_one.model.parameters(), without.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_values_of_hooks_are_written_and_their_state_is_resumed(tmp_path: Path) -> None:
    DefaultTrainer(config(tmp_path, hooks=[LazyCall(Counting)()])).train()
    trainer = DefaultTrainer(config(tmp_path, hooks=[LazyCall(Counting)()], train_iter=6, resume=True))
    trainer.train()
    assert next(hook.count for hook in trainer.hooks if isinstance(hook, Counting)) == 6
    assert '"counted": 6' in (tmp_path / "metrics.json").read_text()


def test_hooks_stand_in_their_slots_also_beside_a_list_of_the_users_own(tmp_path: Path) -> None:
    class Own(DefaultTrainer):
        def build_hooks(self) -> list[HookBase]:
            return super().build_hooks()[:2]

    hooks = [LazyCall(Counting)(), LazyCall(Counting)(slot="check")]
    for kind in (DefaultTrainer, Own):
        trainer = kind(config(tmp_path / kind.__name__, hooks=hooks, callbacks=[LazyCall(Noted)()]))
        slots = [hook.slot for hook in trainer.hooks if isinstance(hook, Counting)]
        assert slots[0] == "check"
        assert len(slots) == 2
        trainer.train()
        assert CALLS[-1] == ("end", "callback")


def test_a_yaml_file_names_its_calls_by_target(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        "train:\n  callbacks:\n  - _target_: trainwright.hooks.EarlyStoppingCallback\n    trainercontrol: null\n"
        "    monitor: epoch_loss\n    mode: min\n  hooks: [{_target_: trainwright.hooks.DeterministicAlgorithms}]\n"
    )
    cfg = config(tmp_path / "run")
    cfg.train = OmegaConf.merge(cfg.train, LazyConfig.load(str(path)).train)
    trainer = DefaultTrainer(cfg)
    assert isinstance(trainer.callbacks[0], EarlyStoppingCallback)
    trainer.train()
    path.write_text("train: {callbacks: [{_target_: os.system, command: exit}]}")
    cfg.train.callbacks = LazyConfig.load(str(path)).train.callbacks
    with pytest.raises(ConfigError, match=r"train\.callbacks\.0.*os\.system.*refused"):
        DefaultTrainer(cfg)


def test_the_config_of_a_run_starts_it_again(tmp_path: Path) -> None:
    early = LazyCall(EarlyStoppingCallback)(trainercontrol=None, monitor="epoch_loss", mode="min", patience=9)
    DefaultTrainer(config(tmp_path, callbacks=[early])).train()
    saved = LazyConfig.load(str(tmp_path / "config.yaml"))
    assert saved.train.callbacks[0]._target_.endswith("EarlyStoppingCallback")
    assert saved.train.callbacks[0].patience == 9


@pytest.mark.parametrize(
    ("train", "facts"),
    [
        ({"callbacks": LazyCall(Noted)()}, r"train\.callbacks: got .*a list of lazy calls"),
        ({"callbacks": [LazyCall(Noted)]}, r"train\.callbacks\.0: LazyCall\(.*Noted\) was not called"),
        ({"callbacks": [LazyCall(Noted)(), Noted]}, r"train\.callbacks\.1: got the class .*LazyCall\(.*Noted\)"),
        ({"hooks": ["Counting"]}, r"train\.hooks\.0: got 'Counting'.*must be a lazy call"),
        ({"hooks": [{"target": "x.Y"}]}, r"train\.hooks\.0: got .*_target_"),
        ({"hooks": [None]}, r"train\.hooks\.0: got None"),
        ({"hooks": [LazyCall(dict)()]}, r"train\.hooks\.0: got .*dict.*trainwright\.hooks\.HookBase"),
        ({"hooks": [LazyCall(Counting)(), LazyCall(Noted)()]}, r"train\.hooks\.1: got Noted.*train\.callbacks"),
        ({"callbacks": [LazyCall(Counting)()]}, r"train\.callbacks\.0: got Counting.*train\.hooks"),
        ({"callbacks": [LazyCall(Noted)(nam="a")]}, r"train\.callbacks\.0\.nam.*takes no argument 'nam'"),
        ({"callbacks": [LazyCall(EarlyStoppingCallback)(patienc=3)]}, r"0\.patienc.*argument 'patienc'.*'patience'"),
        ({"callback": [LazyCall(Noted)()]}, r"train\.callback: .*'train\.callbacks'"),
        ({"hook": [LazyCall(Counting)()]}, r"train\.hook: .*'train\.hooks'"),
        ({"custom_hooks": [LazyCall(Counting)()]}, r"train\.custom_hooks: .*'train\.hooks'"),
    ],
)  # fmt: skip
def test_an_error_names_the_key_with_its_position_what_came_and_the_right_key(
    tmp_path: Path, train: dict[str, Any], facts: str
) -> None:
    with pytest.raises(ConfigError, match=facts):
        DefaultTrainer(config(tmp_path, **train))
    assert ("begin", "callback") not in CALLS


def test_an_error_of_a_constructor_names_the_call(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError, match=r"train\.callbacks\.1.*Unbuildable"):
        DefaultTrainer(config(tmp_path, callbacks=[LazyCall(Noted)(), LazyCall(Unbuildable)()]))


@pytest.mark.parametrize(("name", "key"), OF_LISTS)
def test_a_list_outside_of_train_is_reported_with_its_key(
    tmp_path: Path, name: str, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    cfg = config(tmp_path)
    cfg[name] = [LazyCall(Noted)()]
    with caplog.at_level(logging.WARNING, "trainwright"):
        DefaultTrainer(cfg)
    assert f"{name}: a training does not read this list. Write train.{key} = [...]" in caplog.text
    assert ("override build_hooks" in caplog.text) == (key == "hooks")
    assert not CALLS


@pytest.mark.parametrize("name", HOOKS[1:])
def test_another_name_of_the_list_of_hooks_is_answered_with_it_and_with_the_method(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"train.{name}: .*Did you mean 'train.hooks'\?.*override build_hooks"):
        DefaultTrainer(config(tmp_path, **{name: []}))


@pytest.mark.parametrize("name", ["evaluation.callbacks", "checkpointer.hooks", "extra_hooks", "my_callbacks"])
def test_a_list_in_another_place_of_train_is_answered_with_its_key(tmp_path: Path, name: str) -> None:
    cfg = config(tmp_path)
    OmegaConf.update(cfg.train, name, [], force_add=True)
    key = "train.hooks" if name.endswith("hooks") else "train.callbacks"
    with pytest.raises(ConfigError, match=rf"train\.{re.escape(name)}: .*Did you mean '{key}'"):
        DefaultTrainer(cfg)


def test_a_list_among_the_loaders_is_reported_with_its_key(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cfg = config(tmp_path)
    cfg.dataloader.hooks = [LazyCall(Counting)()]
    with caplog.at_level(logging.WARNING, "trainwright"):
        DefaultTrainer(cfg)
    assert "dataloader.hooks: a training does not read this list. Write train.hooks = [...]" in caplog.text


@pytest.mark.parametrize("given", [(10,), ("run",)])
def test_an_argument_of_train_is_answered_with_the_setting_of_the_length(tmp_path: Path, given: Any) -> None:
    with pytest.raises(ConfigError, match=r"train: got .*train\(0, \d+\).*train\.train_epoch"):
        DefaultTrainer(config(tmp_path)).train(*given)


def test_what_a_dict_sets_is_shown_at_the_start_without_secrets(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "trainwright"):
        given = {"early_stopping": {"patience": 3, "monitor": "epoch_loss"}, "ema": {"decay": 0.5}}
        DefaultTrainer(config(tmp_path, **given, profile={"wait": 1})).print_info()
        DefaultTrainer(config(tmp_path, trackers={"wandb": {"api_key": "s3cret"}})).print_info()
    shown = " ".join(caplog.text.split())
    for setting in ("train.early_stopping={'patience': 3, 'monitor': 'epoch_loss'}", "train.ema={'decay': 0.5}"):
        assert setting in shown
    assert "train.trackers={'wandb':" in shown
    assert "s3cret" not in shown


def test_a_callback_that_fails_ends_the_training_and_is_said_to_have_failed(tmp_path: Path) -> None:
    calls = [LazyCall(Noted)(name="a"), LazyCall(Noted)(name="b", fails_at=2)]
    trainer = DefaultTrainer(config(tmp_path, callbacks=calls))
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert trainer.iter == 1
    assert CALLS[-2:] == [("failed", "a"), ("failed", "b")]


def test_callbacks_are_added_before_the_training_or_to_others_within_it(tmp_path: Path) -> None:
    class Adding(Noted):
        def on_train_batch_end(self, batch: Any, logs: Any) -> None:
            if logs["global_step"] == 2:
                trainer.add_callback(Noted("late"))

    trainer = DefaultTrainer(config(tmp_path / "a", callbacks=[LazyCall(Adding)(name="first")]))
    trainer.train()
    assert CALLS.count(("batch", "late")) == 2

    class AddingHook(HookBase):
        def after_step(self) -> None:
            if not len(trainer.callbacks):
                with pytest.raises(ConfigError, match=r"add_callback: .*train\.callbacks"):
                    trainer.add_callback(Noted())

    trainer = DefaultTrainer(config(tmp_path / "b", hooks=[LazyCall(AddingHook)()]))
    trainer.train()
    trainer.add_callback(Noted("for the next training"))
    trainer.cfg.train.train_iter = 6
    trainer.train()
    assert CALLS.count(("batch", "for the next training")) == 2


def test_a_stop_by_a_callback_is_not_the_length_of_the_next_training(tmp_path: Path) -> None:
    class Stopping(Callback):
        def on_train_batch_end(self, batch: Any, logs: Any) -> None:
            self.trainercontrol.should_training_stop = logs["global_step"] == 2

    trainer = DefaultTrainer(config(tmp_path, callbacks=[LazyCall(Stopping)()]))
    trainer.train()
    assert trainer.iterations_done == 2
    trainer.train()
    assert trainer.iterations_done == 4


def test_a_request_that_the_training_cannot_fulfil_is_an_error(tmp_path: Path) -> None:
    class Requesting(Callback):
        def on_train_batch_end(self, batch: Any, logs: Any) -> None:
            self.trainercontrol.should_evaluate = True

    with pytest.raises(ConfigError, match=r"should_evaluate.*dataloader\.test"):
        DefaultTrainer(config(tmp_path, callbacks=[LazyCall(Requesting)()])).train()
