"""An override counts in whichever way Python lets a user make one: for every method that the documents name."""

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.toys import Classifier, file_config, points, quiet
from trainwright import DefaultTrainer, Trainer, TrainingConfig
from trainwright.base.errors import ConfigTypeError
from trainwright.config import foreign_names
from trainwright.engine import EagerTrainer, HookBase, TrainerBase
from trainwright.hooks import Callback, TrainerControl
from trainwright.hooks.callbacks import CallbackList
from trainwright.hooks.callbacks.logs import Logs
from trainwright.models import Model, ModelConfig

# B batch, F features, C classes.
PAIRS = TensorDataset(torch.randn(16, 4), torch.randint(2, (16,)))


class Log:
    """What was called."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def around(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Another function that calls ``method``."""

        def logged(*arguments: Any, **named: Any) -> Any:
            self.calls.append(method.__name__)
            return method(*arguments, **named)

        return logged

    def decorated(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """The same, with the name and the module of ``method``, as decorators commonly give them."""
        return functools.wraps(method)(self.around(method))


# Each makes an object of a class like ``base`` in which the method ``name`` is logged.
def in_a_subclass(base: type, name: str, log: Log, monkeypatch: pytest.MonkeyPatch) -> tuple[type, Any]:
    return type("Sub", (base,), {name: log.around(getattr(base, name))}), None


def decorated(base: type, name: str, log: Log, monkeypatch: pytest.MonkeyPatch) -> tuple[type, Any]:
    return type("Sub", (base,), {name: log.decorated(getattr(base, name))}), None


def from_a_mixin(base: type, name: str, log: Log, monkeypatch: pytest.MonkeyPatch) -> tuple[type, Any]:
    mixin = type("Mixin", (), {name: log.decorated(getattr(base, name))})
    return type("Sub", (mixin, base), {}), None


def partial_method(base: type, name: str, log: Log, monkeypatch: pytest.MonkeyPatch) -> tuple[type, Any]:
    return type("Sub", (base,), {name: functools.partialmethod(log.decorated(getattr(base, name)))}), None


def on_the_object(base: type, name: str, log: Log, monkeypatch: pytest.MonkeyPatch) -> tuple[type, Any]:
    return base, lambda made: setattr(made, name, log.decorated(getattr(made, name)))


def on_the_class(base: type, name: str, log: Log, monkeypatch: pytest.MonkeyPatch) -> tuple[type, Any]:
    monkeypatch.setattr(base, name, log.decorated(getattr(base, name)))
    return base, None


WAYS = [in_a_subclass, decorated, from_a_mixin, partial_method, on_the_object, on_the_class]
BUILT_WITH = ("create_train_dataloader", "create_eval_dataloader", "build_hooks", "build_writers")

TRAINER_METHODS = [
    "train_step", "training_step", "optimization_step", "compute_loss", "evaluate", "evaluate_step", "evaluation_step",
    "compute_metric", "update_metrics", "prepare_input_batch", "inner_training_loop", "set_train_mode", "run_step",
    "before_train", "before_step", "after_step", "after_train", *BUILT_WITH,
]  # fmt: skip


def objects_config(folder: Path, **settings: Any) -> TrainingConfig:
    given: dict[str, Any] = {"num_epochs": 2, "batch_size": 4, "learning_rate": 0.1, "save_enabled": False}
    given |= {"early_stopping": None, "progress_bar": False, "tensorboard": None}
    return TrainingConfig(output_dir=folder, **{**given, **settings})


def ways_of(names: list[str], built_with: tuple[str, ...]) -> list[Any]:
    """Each method with each way; not on the object where the method is called while the object is made."""
    return [
        pytest.param(name, way, id=f"{name}-{way.__name__}")
        for name in names
        for way in WAYS
        if not (way is on_the_object and name in built_with)
    ]


def trained(kind: type, change: Any, folder: Path, **settings: Any) -> Trainer:
    trainer: Trainer = kind(nn.Linear(4, 2), objects_config(folder, **settings), PAIRS, PAIRS)
    if change is not None:
        change(trainer)
    trainer.train()
    return trainer


@pytest.mark.exhaustive(every=12)
@pytest.mark.parametrize(
    ("name", "way"),
    ways_of(TRAINER_METHODS, ("create_train_dataloader", "create_eval_dataloader", "build_hooks")),
)
def test_every_documented_method_of_the_trainer(
    name: str, way: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Log()
    trainer = trained(*way(Trainer, name, log, monkeypatch), tmp_path)
    times = {"train_step": 8, "training_step": 8, "optimization_step": 8, "inner_training_loop": 2, "run_step": 8}
    assert len(log.calls) >= times.get(name, 1)
    assert trainer.last_eval_results


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_training_has_its_metrics_with_any_override(
    way: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trained(*way(Trainer, "compute_loss", Log(), monkeypatch), tmp_path, metrics=["Accuracy"])
    assert "accuracy" in trainer.storage.latest()
    assert not trainer.model._forward_hooks  # the user's model is as it was


@pytest.mark.exhaustive(every=3)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_an_override_counts_with_graph_mode(way: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log()
    trained(*way(Trainer, "train_step", log, monkeypatch), tmp_path, graph=True, eval_strategy="no")
    assert len(log.calls) == 8


def test_what_is_assigned_to_the_object_is_still_there_afterwards(tmp_path: Path) -> None:
    trainer = Trainer(nn.Linear(4, 2), objects_config(tmp_path), PAIRS)

    def mine(model: Any, inputs: Any) -> Tensor:
        return nn.functional.cross_entropy(model(inputs[0]), inputs[1]) * 2

    trainer.compute_loss = mine  # type: ignore[method-assign]
    trainer.set_loss(nn.MSELoss())
    trainer.train()
    assert trainer.compute_loss is mine


def files_config(folder: Path, **train: Any) -> Any:
    return file_config(folder, Classifier, points, train_iter=4, train_micro_batch_size=4, **train)


DEFAULT_METHODS = [
    "run_step", "before_train", "before_step", "after_step", "after_train", "resume_or_load", "build_hooks",
    "build_writers",
]  # fmt: skip
OF_THE_CLASS = [
    "get_batch", "build_model", "build_optimizer", "build_lr_scheduler", "build_train_loader", "build_test_loader",
    "build_tokenizer", "auto_scale_hyperparams",
]  # fmt: skip


@pytest.mark.exhaustive(every=9)
@pytest.mark.parametrize(
    ("name", "way"),
    ways_of(DEFAULT_METHODS, ("resume_or_load", "build_hooks", "build_writers")),
)
@pytest.mark.slow
def test_every_method_of_the_default_trainer(
    name: str, way: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Log()
    kind, change = way(DefaultTrainer, name, log, monkeypatch)
    trainer = kind(files_config(tmp_path))
    if change is not None:
        change(trainer)
    trainer.train()
    assert log.calls


@pytest.mark.exhaustive(every=9)
@pytest.mark.parametrize("name", OF_THE_CLASS)
@pytest.mark.slow
def test_every_class_method_of_the_default_trainer(name: str, tmp_path: Path) -> None:
    log = Log()
    inner = getattr(DefaultTrainer, name)
    decorated = staticmethod(log.decorated(inner))
    kind = type("Sub", (DefaultTrainer,), {name: decorated})
    trainer = kind(files_config(tmp_path))
    trainer.train()
    assert log.calls
    prefetches = trainer._trainer.batches.prefetches_to is not None
    assert prefetches == (name != "get_batch")  # an own one wants what the loader gave


@pytest.mark.exhaustive(every=4)
@pytest.mark.parametrize("amp", [False, True])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("name", ["run_step", "backward", "update", "write_metrics"])
def test_every_method_of_the_eager_trainer(name: str, way: Any, amp: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log()
    kind, change = way(EagerTrainer, name, log, monkeypatch)
    model = Classifier()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0) if amp else None
    loader = [{"inputs": torch.ones(4, 4), "labels": torch.ones(4, dtype=torch.long)}]
    stepper = kind(model, loader, torch.optim.SGD(model.parameters(), lr=0.1), grad_scaler=scaler)
    if change is not None:
        change(stepper)
    stepper.train(0, 3)
    assert len(log.calls) == 3


@pytest.mark.exhaustive(every=4)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("name", ["before_train", "before_step", "after_step", "after_train"])
@pytest.mark.slow
def test_every_moment_of_a_hook(name: str, way: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(HookBase):
        pass

    log = Log()
    kind, change = way(Mine, name, log, monkeypatch)
    hook = kind()
    trainer = DefaultTrainer(files_config(tmp_path))
    trainer.register_hooks([hook])
    if change is not None:
        change(hook)
    trainer.train()
    assert len(log.calls) == (4 if name.endswith("step") else 1)


CALLBACK_METHODS = [name for name in dir(Callback) if name.startswith("on_")]


@pytest.mark.exhaustive(every=12)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("name", CALLBACK_METHODS)
def test_every_moment_of_a_callback(name: str, way: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log()
    kind, change = way(Callback, name, log, monkeypatch)
    callback = kind()
    trainer = Trainer(nn.Linear(4, 2), objects_config(tmp_path), PAIRS, PAIRS)
    trainer.add_callback(callback)
    if change is not None:
        change(callback)
    trainer.train()
    assert log.calls


@pytest.fixture
def scored() -> type[Model]:
    class Scored(Model):
        def __init__(self, config: ModelConfig | None = None) -> None:
            super().__init__(config or ModelConfig())
            self.layer = nn.Linear(4, 2)

        def forward(self, inputs: Tensor) -> dict[str, Tensor]:
            return {"logits": self.layer(inputs)}

        def compute_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
            return nn.functional.cross_entropy(logits, labels)

    return Scored


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("way", WAYS[1:], ids=lambda way: way.__name__)  # the first takes everything
def test_the_loss_of_a_model(
    way: Any, late: bool, scored: type[Model], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Log()
    if late and way is on_the_class:
        model = scored()
        trainer = Trainer(model, objects_config(tmp_path), points())
        way(scored, "compute_loss", log, monkeypatch)
    else:
        kind, change = way(scored, "compute_loss", log, monkeypatch)
        model = kind()
        if change is not None and not late:
            change(model)
        trainer = Trainer(model, objects_config(tmp_path), points())
        if change is not None and late:
            change(model)
    trainer.train()
    assert len(log.calls) >= 8


def test_a_method_that_cannot_be_called_is_refused_and_a_misspelt_one_named(caplog: pytest.LogCaptureFixture) -> None:
    class OfAnotherLibrary(HookBase):
        def after_step(self, trainer: Any) -> None: ...  # type: ignore[override]

    class Misspelt(HookBase):
        def after_stp(self) -> None: ...

        def after_all(self) -> None: ...

    class WrongCallback(Callback):
        def on_epoch_end(self, logs: Any) -> None: ...  # type: ignore[override]

    with pytest.raises(ConfigTypeError, match=r"Library\.after_step is called with \(\): .*after_step\(self\)"):
        TrainerBase().register_hooks([OfAnotherLibrary()])
    with pytest.raises(ConfigTypeError, match=r"on_epoch_end is called with \(epochs, logs\)"):
        CallbackList([WrongCallback()])
    with pytest.raises(ConfigTypeError, match=r"pass a list"):
        CallbackList(Callback())  # type: ignore[arg-type]
    TrainerBase().register_hooks([Misspelt()])
    (record,) = caplog.records
    caplog.clear()
    CallbackList([type("Forgetful", (Callback,), {"state_dict": lambda self: {}})()])
    assert "Forgetful has state_dict, but no load_state_dict: its state is not saved" in caplog.text
    assert record.getMessage() == "Misspelt.after_stp is never called: hooks have after_step."


def warned_of(trainer: Any, caplog: pytest.LogCaptureFixture) -> dict[str, str]:
    """By the name of a method, what it could be, of each warning."""
    trainer.train()
    messages = [record.getMessage() for record in caplog.records if "is never called by the training" in record.msg]
    return {message.partition(" ")[0].partition(".")[2]: message.partition("training. ")[2] for message in messages}


@pytest.mark.parametrize("api", ["python", "config"])
def test_a_misspelt_method_of_a_trainer_is_named_at_the_start(
    api: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Mixin:
        def training_steps(self, model: Any) -> None: ...

    if api == "python":

        class Mine(Mixin, Trainer):
            def compute_losss(self, model: Any, inputs: Any) -> None: ...
            def validation_step(self, batch: Any) -> None: ...
            def shown_samples(self) -> None: ...
            def _compute_los(self) -> None: ...

        trainer: Any = Mine(Classifier(), quiet(tmp_path, max_steps=1), points())
        expected = {
            "training_steps": "Did you mean training_step?",
            "compute_losss": "Did you mean compute_loss?",
            "validation_step": "Here it is evaluation_step.",
        }
    else:

        class MineOfFiles(DefaultTrainer):
            @classmethod
            def build_optimiser(cls, cfg: Any, model: Any) -> None: ...
            def run_steps(self) -> None: ...

        trainer = MineOfFiles(file_config(tmp_path, Classifier, points, train_iter=1, train_micro_batch_size=4))
        expected = {"build_optimiser": "Did you mean build_optimizer?", "run_steps": "Did you mean run_step?"}
    assert warned_of(trainer, caplog) == expected


def test_helpers_of_the_users_own_are_no_misspelt_methods(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Mine(Trainer):
        def compute_loss(self, model: Any, inputs: Any) -> Any:
            return super().compute_loss(model, inputs)

        def compute_losses(self) -> None: ...

        def train_step(self, model: Any, inputs: Any) -> Any:
            return next(self.train_steps() for _ in range(1)) or super().train_step(model, inputs)

        def train_steps(self) -> None: ...

        def create_optimizer(self) -> None: ...

    class Other(HookBase):
        def after_train(self) -> None:
            self.trainer.create_optimizer()

    trainer = Mine(Classifier(), quiet(tmp_path, max_steps=1), points())
    trainer.register_hooks([Other()])
    assert warned_of(trainer, caplog) == {}


def test_a_misspelt_method_of_a_callback_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    class Mine(Callback):
        def on_epoch_ends(self, epochs: int, logs: Any) -> None: ...

    CallbackList([Mine()])
    (message,) = caplog.messages
    assert message.startswith("Mine.on_epoch_ends is never called: ")
    assert message.endswith(" Did you mean on_epoch_end?")


def test_methods_of_other_libraries_are_answered_with_ours(caplog: pytest.LogCaptureFixture) -> None:
    for name, here in foreign_names.CALLBACK_METHODS.items():
        caplog.clear()
        CallbackList([type("Mine", (Callback,), {name: lambda self, *arguments: None})()])
        assert caplog.messages == [f"Mine.{name} is never called. Here it is {here}."]
        ours = here.partition("(")[0].partition(" ")[0]
        assert hasattr(Callback, ours) or ours in ("state_dict", "load_state_dict", "optimization_step")
    for name, here in foreign_names.HOOK_METHODS.items():
        caplog.clear()
        hook = type("Mine", (HookBase,), {name: lambda self, *arguments: None})
        if hasattr(HookBase, name):
            continue
        TrainerBase().register_hooks([hook()])
        assert caplog.messages == [f"Mine.{name} is never called. Here it is {here}."]


@pytest.mark.parametrize("kind", [HookBase, Callback])
def test_no_method_of_the_class_is_a_warning(kind: Any, caplog: pytest.LogCaptureFixture) -> None:
    names = [name for name in dir(kind) if name[0] != "_" and inspect.isfunction(getattr(kind, name))]
    assert {"after_step", "before_train", "after_train"} <= {*names} or "on_train_begin" in names
    for name in names:
        one = type("Mine", (kind,), {name: getattr(kind, name)})()
        CallbackList([one]) if kind is Callback else TrainerBase().register_hooks([one])
    assert caplog.messages == []


def test_a_helper_with_the_name_of_another_library_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    class Mine(Callback):
        def on_epoch_end(self, epochs: int, logs: Any) -> None:
            self.after_epoch()

        def after_epoch(self) -> None: ...

    CallbackList([Mine()])
    assert not caplog.messages


def test_what_other_libraries_set_to_end_a_training_is_answered(caplog: pytest.LogCaptureFixture) -> None:
    class Mine(Callback):
        def on_epoch_end(self, epochs: int, logs: Any) -> None:
            self.model.stop_training = True

    class Own(Callback):
        def on_epoch_end(self, epochs: int, logs: Any) -> None:
            self.stop_training()

        def stop_training(self) -> None: ...

    class OfLightning(Callback):
        def on_train_batch_end(self, batch: Any, logs: Any) -> None:
            self.trainer.should_stop = True

    class OwnFlag(Callback):
        def on_epoch_end(self, epochs: int, logs: Any) -> None:
            self.should_stop = epochs > 3
            self.trainercontrol.should_training_stop = self.should_stop

    class Stops(Callback):
        def on_epoch_end(self, epochs: int, logs: Any) -> None:
            self.trainer.model.should_stop = True
            self.trainer.stop("enough")

    class OfHelper(Callback):
        def __init__(self, rule: Any) -> None:
            self.rule, self.stop_training = rule, False

        def on_epoch_end(self, epochs: int, logs: Any) -> None:
            self.rule.should_stop = self.stop_training = epochs > 3

    class Asks(OfHelper):
        def on_epoch_end(self, epochs: int, logs: Any) -> None:
            if self.rule.should_stop(epochs):
                raise KeyboardInterrupt

    class Reads(Mine):
        def on_train_end(self, logs: Any) -> None:
            assert self.model.stop_training

    class Hook(HookBase):
        def after_step(self) -> None:
            self.trainer.should_stop = self.trainer.iter > 3  # type: ignore[attr-defined]

    class OwnHook(HookBase):
        def before_train(self) -> None:
            self.should_stop = False

    CallbackList([Own(), OwnFlag(), Stops(), OfHelper(None), Asks(None), Reads()])
    TrainerBase().register_hooks([OwnHook()])
    assert not caplog.messages
    CallbackList([Mine(), OfLightning()])
    TrainerBase().register_hooks([Hook()])
    callback, hook = "self.trainercontrol.should_training_stop = True", "self.trainer.stop(reason)"
    assert caplog.messages == [
        f"{what}, which has no effect on the training. Here it is {here}."
        for what, here in (
            ("Mine sets stop_training", callback),
            ("OfLightning sets should_stop", callback),
            ("Hook sets should_stop", hook),
        )
    ]
    control = TrainerControl()
    for name in ("should_stop", "stop_training"):
        with pytest.raises(AttributeError, match=r"no such flag; .* Here it is should_training_stop\.$"):
            setattr(control, name, True)
    with pytest.raises(AttributeError, match=r"Did you mean 'should_save'"):
        control.shoud_save = True  # type: ignore[attr-defined]


def test_a_value_of_the_logs_by_the_name_of_others_is_answered() -> None:
    logs = Logs()
    with pytest.raises(KeyError, match="Results of an evaluation, such as 'eval_loss', are there after it"):
        _ = logs["val_loss"]
    with pytest.raises(KeyError, match="The mean of the epoch is 'epoch_loss', that of the last batch 'step_loss'"):
        _ = logs["loss"]
    logs["eval_loss"] = 1.0
    with pytest.raises(KeyError, match=r"logs has no 'val_loss'\. Did you mean 'eval_loss'\?"):
        _ = logs["val_loss"]


def test_functions_and_dicts_in_place_of_parts_are_answered(tmp_path: Path) -> None:
    def with_(**given: Any) -> str:
        with pytest.raises(ConfigTypeError) as raised:
            Trainer(Classifier(), quiet(tmp_path), points(), **given)
        return str(raised.value)

    assert "Pass an object: optimizer=torch.optim.AdamW(model.parameters(), lr=...)" in with_(optimizer=lambda one: one)
    assert "Pass an object: lr_scheduler=torch.optim.lr_scheduler.LambdaLR(" in with_(lr_scheduler=lambda step: 1.0)
    assert "Pass the object in it: lr_scheduler=scheduler" in with_(lr_scheduler={"scheduler": 1, "interval": "step"})


def test_a_file_of_another_library_is_no_checkpoint(tmp_path: Path) -> None:
    file = tmp_path / "last.ckpt"
    torch.save({"state_dict": Classifier().state_dict()}, file)
    with pytest.raises(FileNotFoundError, match=r"holds no checkpoint; .*of another library: model.load_state_dict"):
        Trainer(Classifier(), quiet(tmp_path / "run", resume_from_checkpoint=str(file)), points()).train()
