"""What a resume says about settings that have changed, and which value then trains."""

import inspect
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn
from torch.utils.data import TensorDataset

from tests.toys import Classifier, file_config, pairs, points, quiet
from trainwright import DefaultTrainer, LazyCall, Trainer
from trainwright.cli.train import main
from trainwright.config import ConfigError
from trainwright.engine.own_loop import TrainingLoop
from trainwright.hooks import Callback
from trainwright.optim import WarmupCosineLR, get_default_optimizer_params

KEPT, TAKEN = "kept from the checkpoint", "taken now"
Build = Callable[..., Any]


def python(folder: Path, kind: type[Trainer] = Trainer, **settings: Any) -> Trainer:
    given: dict[str, Any] = {"num_epochs": 1, "batch_size": 8, "learning_rate": 0.01, "early_stopping": None}
    torch.manual_seed(0)
    return kind(nn.Linear(6, 3), quiet(folder, **(given | settings)), pairs(24), pairs(24))


def config_file(folder: Path, kind: type[DefaultTrainer] = DefaultTrainer, **settings: Any) -> DefaultTrainer:
    cfg = file_config(folder, lambda: Classifier(seed=0), points, train_iter=3, train_micro_batch_size=8)
    cfg.optim = LazyCall(torch.optim.AdamW)(
        params=LazyCall(get_default_optimizer_params)(clip_grad_max_norm=1.0), lr=0.01, weight_decay=0.1
    )
    cfg.train.scheduler = LazyCall(WarmupCosineLR)(warmup_factor=0.001)
    for name, value in settings.items():
        OmegaConf.update(cfg, name, value, force_add=True)
    return kind(cfg)


def table(caplog: pytest.LogCaptureFixture) -> dict[str, str]:
    """The rows of the table of changes, by setting."""
    said = [record.getMessage() for record in caplog.records if "Resumed with other settings" in record.getMessage()]
    rows = [line.split(maxsplit=1) for text in said for line in text.splitlines()[2:] if not line.startswith("  A new")]
    return dict(rows)


class Mine(torch.nn.Linear):
    def forward(self, inputs, labels):  # type: ignore[no-untyped-def, override]
        return {"loss": super().forward(inputs).square().mean()}


OWN_FILE = """
model = LazyCall(Mine)(in_features=2, out_features=1)
data = [dict(inputs=torch.ones(2), labels=1)] * 8
dataloader = dict(train=LazyCall(torch.utils.data.DataLoader)(dataset=data, batch_size=4))
train = get_config("common/train.py").train
optim = get_config("common/optim.py").optim
train.update(output_dir="{folder}", train_iter=2, train_micro_batch_size=4, progress_bar=False)
train.evaluation.enabled = False
"""
LONGER: dict[Build, dict[str, Any]] = {
    python: {"num_epochs": 2, "resume_from_checkpoint": True},
    config_file: {"train.train_iter": 6, "train.resume": True},
}
ADAM = {"name_": "AdamW", "betas": [0.9, 0.999]}
STEP = {"lr_scheduler_type": None, "lr_scheduler": "StepLR"}
SMOOTHED = {"name_": "CrossEntropyLoss", "label_smoothing": 0.5}
LINEAR = {"lr_scheduler_type": "linear"}


@pytest.mark.parametrize(
    ("build", "old", "new", "row", "effect"),
    [
        (python, {}, {"learning_rate": 0.5}, "optimizer.lr 0.01 0.5", KEPT),
        (python, {}, {"weight_decay": 0.25}, "optimizer.weight_decay 0.0 0.25", KEPT),
        (python, {"optimizer": ADAM}, {"optimizer": ADAM | {"betas": [0.5, 0.75]}},
         "optimizer.betas [0.9, 0.999] [0.5, 0.75]", KEPT),
        (python, STEP | {"lr_scheduler_kwargs": {"step_size": 1, "gamma": 0.5}},
         STEP | {"lr_scheduler_kwargs": {"step_size": 1, "gamma": 0.25}}, "lr_scheduler.gamma 0.5 0.25", KEPT),
        (python, LINEAR, {"lr_scheduler_type": "cosine"}, "lr_scheduler_type linear cosine", TAKEN),
        (python, LINEAR, {"warmup_steps": 5}, "warmup_steps 0 5", TAKEN),
        (python, {}, {"max_grad_norm": 1e-6}, "max_grad_norm None 1e-06", TAKEN),
        (python, {}, {"loss": SMOOTHED}, f"loss CrossEntropyLoss {SMOOTHED}", TAKEN),
        (python, {}, {"mixed_precision": "bf16"}, "mixed_precision None bf16", TAKEN),
        (python, {}, {"seed": 7}, "seed 42 7", f"{TAKEN}: the order"),
        (config_file, {}, {"optim.lr": 0.5}, "optimizer.lr 0.01 0.5", KEPT),
        (config_file, {}, {"optim.weight_decay": 0.25}, "optimizer.weight_decay 0.1 0.25", KEPT),
        (config_file, {}, {"optim.betas": [0.5, 0.75]}, "optimizer.betas [0.9, 0.999] [0.5, 0.75]", KEPT),
        (config_file, {}, {"optim.params.clip_grad_max_norm": 1e-6},
         "optim.params.clip_grad_max_norm 1.0 1e-06", TAKEN),
        (config_file, {}, {"train.warmup_ratio": 0.9}, "train.warmup_ratio 0 0.9", TAKEN),
        (config_file, {}, {"train.scheduler.alpha": 0.75}, "train.scheduler.alpha not set 0.75", TAKEN),
        (config_file, {}, {"train.amp.enabled": True}, "train.amp.enabled False True", TAKEN),
        (config_file, {}, {"train.seed": 7}, "train.seed 1234 7", f"{TAKEN}: the order"),
    ],
)  # fmt: skip
def test_a_changed_setting_is_named_with_what_trains(
    build: Build,
    old: dict[str, Any],
    new: dict[str, Any],
    row: str,
    effect: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The effect is what it says: the weights are those of a resume with the old value, or they are not."""

    def resumed(folder: str, **settings: Any) -> Any:
        build(tmp_path / folder, **old).train()
        caplog.clear()
        trainer = build(tmp_path / folder, **(old | LONGER[build] | settings))
        trainer.train()
        return trainer

    same = resumed("same")
    assert table(caplog) == {}
    other = resumed("other", **new)
    name = row.split(maxsplit=1)[0]
    assert list(table(caplog)) == [name]
    assert " ".join([name, *table(caplog)[name].split()]).startswith(f"{row} {effect}")
    assert ("weights only (init_weights_from, train.load_weight;" in caplog.text) == (effect == KEPT)
    pairs = zip(same.model.parameters(), other.model.parameters(), strict=True)
    assert all(torch.equal(one, another) for one, another in pairs) == (effect == KEPT)


@pytest.mark.parametrize("build", [python, config_file])
def test_settings_show_what_trains_and_a_further_resume_compares_with_it(
    build: Build, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "trainwright")
    rate, decay = ("learning_rate", "weight_decay") if build is python else ("optim.lr", "optim.weight_decay")
    old, new = {rate: 0.0125, decay: 0.0625}, {rate: 0.5, decay: 0.25}
    build(tmp_path, **old).train()
    caplog.clear()
    trainer = build(tmp_path, **LONGER[build], **new)
    trainer.train()
    assert set(table(caplog)) == {"optimizer.lr", "optimizer.weight_decay"}
    (header,) = [text for text in map(logging.LogRecord.getMessage, caplog.records) if text.startswith("Training\n")]
    file = next(tmp_path / name for name in ("training_config.yaml", "config.yaml") if (tmp_path / name).exists())
    assert "lr 0.0125" in header
    for text in (header, file.read_text()):
        assert "0.5" not in text
        assert "0.25" not in text
    caplog.clear()
    build(tmp_path, **(LONGER[build] | ({"num_epochs": 3} if build is python else {"train.train_iter": 9})), **old)
    assert table(caplog) == {}


def test_an_optimizer_that_is_passed_and_a_loop_of_the_user_are_compared(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def passed(rate: float, **settings: Any) -> None:
        model = Classifier(seed=0)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=rate)
        config = quiet(tmp_path / "passed", batch_size=8, early_stopping=None, **settings)
        Trainer(model, config, points(), optimizer=optimizer).train()

    def loop(rate: float, max_iter: int) -> None:
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=rate)
        data = torch.utils.data.DataLoader(TensorDataset(torch.randn(8, 4)), batch_size=4)
        for (batch,) in TrainingLoop(model, optimizer, data, max_iter=max_iter, output_dir=tmp_path / "loop"):
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    passed(0.5, num_epochs=1)
    passed(0.25, num_epochs=2, resume_from_checkpoint=True)
    assert set(table(caplog)) == {"optimizer.lr", "optimizer.momentum"}
    caplog.clear()
    loop(0.5, 2)
    loop(0.25, 4)
    assert set(table(caplog)) == {"optimizer.lr", "optimizer.momentum"}


class Own(Trainer):
    pass


class OwnDefault(DefaultTrainer):
    pass


@pytest.mark.parametrize(("build", "own"), [(python, Own), (config_file, OwnDefault)])
@pytest.mark.parametrize("is_own_first", [True, False])
def test_another_class_of_trainer_is_refused_unless_it_is_allowed(
    build: Build, own: Any, is_own_first: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = [{"kind": own}, {}] if is_own_first else [{}, {"kind": own}]
    build(tmp_path, **first).train()
    setting = "allow_other_trainer" if build is python else "train.allow_other_trainer"
    with pytest.raises(ConfigError, match=rf"{own.__name__}.*{setting}=True"):
        build(tmp_path, **LONGER[build], **second)
    build(tmp_path, **LONGER[build], **second, **{setting: True}).train()
    assert list(table(caplog)) == ["trainer"]
    caplog.clear()
    build(tmp_path, **LONGER[build], **second)  # it is the class of the run now
    assert table(caplog) == {}


class Named(Callback):
    pass


def test_another_number_of_samples_per_update_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config_file(tmp_path).train()
    config_file(tmp_path, **LONGER[config_file], **{"train.num_accumulation_steps": 2}).train()
    said = table(caplog)
    assert said["train.num_accumulation_steps"].endswith(TAKEN)
    assert re.match(rf"8 +16 +{TAKEN}: an update has another number of samples", said["train.global_batch_size"])


def test_a_class_of_the_config_file_is_no_change(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "config.py"
    text = inspect.getsource(Mine) + OWN_FILE.format(folder=tmp_path / "run")
    file.write_text(f"import torch\nfrom trainwright import LazyCall, get_config\n{text}")
    assert main([str(file)], prog="trainwright train") == 0
    assert main([str(file), "--resume", "train.train_iter=4"], prog="trainwright train") == 0
    assert table(caplog) == {}


def test_other_callbacks_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = python(tmp_path)
    trainer.add_callback(Named())
    trainer.train()
    caplog.clear()
    python(tmp_path, **LONGER[python]).train()
    assert "other callbacks than before: Named; now none" in caplog.text


@pytest.mark.parametrize(("build", "name"), [(python, "freeze_bn"), (config_file, "train.freeze_bn")])
def test_a_setting_that_an_older_version_does_not_have_is_no_change_while_it_has_its_default(
    build: Build, name: str, tmp_path: Path
) -> None:
    unchanged = build(tmp_path / "default")
    before = unchanged.run.recorded_settings()
    del before[name]
    assert unchanged.run.resume_with(before) == {}
    changed = build(tmp_path / "other", **{name: True})
    assert changed.run.resume_with(before)[name] == TAKEN
