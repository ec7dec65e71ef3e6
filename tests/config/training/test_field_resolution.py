"""Settings as users write them are resolved to fields and checked, with every fault in one message."""

import copy
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from trainwright import TrainingConfig
from trainwright.base.errors import ConfigError, ConfigKeyError, ConfigTypeError
from trainwright.config import LRSchedulerType, MetricConfig, OptimizerType, PrecisionType, TaskType


class OwnLoss(torch.nn.Module):
    """A loss of the user's."""


def test_every_fault_is_in_one_message() -> None:
    with pytest.raises(ConfigError) as caught:
        TrainingConfig(batch_size=0, lr="fast", epoch_num=True, warmup_ratio=2, eval_strategy="often", sede=1, loss="x")
    message = str(caught.value)
    assert "TrainingConfig.batch_size: got 0 (int); it must be a whole number >= 1." in message
    assert "TrainingConfig.lr: got 'fast' (str); it must be a number > 0." in message
    assert "TrainingConfig.epoch_num: got True (bool)" in message
    assert "TrainingConfig.warmup_ratio: got 2 (int); it must be a number in [0, 1]." in message
    assert "TrainingConfig.eval_strategy: got 'often' (str); it must be 'epoch', 'eval_epoch', 'step'" in message
    assert "TrainingConfig.sede: no such setting. Did you mean 'seed'?" in message
    assert "TrainingConfig.loss: got 'x'. Allowed: " in message
    assert message.count("Allowed") == 1
    assert len(message.splitlines()) == 7


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"optimizer": {"name": "SGD"}}, "which lacks the key 'name_'"),
        ({"optimizer": {"name_": "SGD", "lr": 0.1}, "lr": 0.2}, "optimizer has lr=0.1"),
        ({"optimizer": "Adamm"}, r"TrainingConfig.optimizer: got 'Adamm'. Did you mean 'Adam'\?"),
        ({"optimizer": "Optimizer"}, "TrainingConfig.optimizer"),
        (
            {"optimizer": {"name_": "SGD", "momentun": 0.9}},
            r"SGD has no argument 'momentun'. Did you mean 'momentum'\?",
        ),
        ({"loss": "Crossentropy"}, "Write loss='CrossEntropyLoss'"),
        ({"loss": {"name_": "MSELoss", "reduction": "sum"}}, "must be the mean"),
        ({"lr_scheduler_type": "constant", "warmup_steps": 3}, "constant_with_warmup"),
        ({"eval_steps": 3}, "TrainingConfig.eval_steps"),
        ({"eval_strategy": "step"}, "TrainingConfig.eval_steps: .*eval_steps=500"),
        ({"device": "gpu:7"}, r"TrainingConfig.device: got 'gpu:7'.* Did you mean 'cuda:7'\?"),
        ({"lr_scheduler": "cosine"}, "which is a value of lr_scheduler_type: lr_scheduler_type='cosine'"),
        ({"lr_scheduler_type": "StepLR"}, "lr_scheduler={'name_': 'StepLR', ...}"),
        ({"lr_scheduler_type": "Cosin"}, r"Did you mean 'cosine'\?"),
        ({"loss": "mae"}, r"Write loss='L1Loss'"),
        ({"optimizer": torch.optim.SGD([torch.zeros(1)])}, "pass it to the trainer: .*optimizer="),
        ({"optimizer": torch.optim.SGD}, "give its name, 'SGD'"),
        (
            {"loss": torch.nn.CrossEntropyLoss},
            r"got the class CrossEntropyLoss; give its name, 'CrossEntropyLoss', .*object .*CrossEntropyLoss\(...\)",
        ),
        ({"loss": OwnLoss}, r"got the class OwnLoss; pass an object of it to the trainer: .*loss=OwnLoss\(...\)"),
        ({"strategy": "fsdp"}, "zero_stage"),
        ({"optimizer": {"name_": "SGD", "lr": "fast"}}, "TrainingConfig.optimizer: got lr='fast'"),
        ({"lr_scheduler": "stp"}, r"TrainingConfig.lr_scheduler: got 'stp'. Did you mean 'step'\?"),
        ({"lr_scheduler": "step"}, "StepLR needs step_size"),
        ({"lr_scheduler": "step", "lr_scheduler_kwargs": {"stepsize": 3}}, r"Did you mean 'step_size'\?"),
        ({"lr_scheduler_kwargs": {"gamma": 0.1}}, "TrainingConfig.lr_scheduler_kwargs.*lr_scheduler=None"),
        (
            {"lr_scheduler": {"name_": "StepLR", "step_size": 3}, "lr_scheduler_kwargs": {"step_size": 4}},
            "step_size, which lr_scheduler has too",
        ),
        (
            {"lr_scheduler": "constant", "lr_scheduler_type": "linear"},
            "lr_scheduler: got 'constant', and lr_scheduler_type='linear'",
        ),
        ({"lr_scheduler": "constant", "warmup_ratio": 0.1}, "got None with a warm-up"),
        ({"lr_scheduler_type": {"name_": "cosine", "num_cycles": 2}}, "cosine_annealing"),
        ({"lr_scheduler_type": {"name_": "ExponentialLR", "gamma": 0.9}, "warmup_steps": 2}, "with a warm-up"),
        ({"early_stopping": {"patiense": 3}}, r"early_stopping.patiense: no such key. Did you mean 'patience'\?"),
        ({"early_stopping": {"patience": -1}}, "early_stopping.patience: got -1 .int.; it must be a whole number >= 0"),
        ({"early_stopping": {"mode": "up"}}, "early_stopping.mode: got 'up' .str.; it must be 'max', 'min' or 'auto'"),
        ({"early_stopping": 3}, "TrainingConfig.early_stopping: got 3 .int.; it must be a dict"),
        ({"model_checkpoint": {}}, "one of every_n_epoch and every_n_iteration"),
        ({"model_checkpoint": {"every_n_epoch": 1, "every_n_iteration": 1}}, "one of every_n_epoch and"),
        ({"model_checkpoint": {"every_n_epoch": 0}}, "model_checkpoint.every_n_epoch: got 0"),
        ({"tensorboard": {"logdir": "x"}}, "tensorboard.logdir: no such key. Did you mean 'log_dir'"),
        ({"checkpoints_dir": "../elsewhere"}, "TrainingConfig.checkpoints_dir.*inside output_dir"),
        ({"checkpoints_dir": "/elsewhere"}, "TrainingConfig.checkpoints_dir.*inside output_dir"),
        ({"checkpoints_dir": "."}, "TrainingConfig.checkpoints_dir.*inside output_dir"),
        ({"checkpoints_dir": "metrics.json"}, "TrainingConfig.checkpoints_dir.*is a file of the run"),
        ({"logs_dir": "run.json/logs"}, "TrainingConfig.logs_dir.*is a file of the run"),
        ({"output_dir": "a\0b"}, "TrainingConfig.output_dir.*without the character NUL"),
        ({"output_dir": "ä" * 128}, "TrainingConfig.output_dir.*at most 255 bytes"),
        ({"checkpoints_dir": "a/" + "b" * 256}, "TrainingConfig.checkpoints_dir.*at most 255 bytes"),
        ({"tensorboard": {"comment": "../../x"}}, "TrainingConfig.tensorboard: comment.*inside logs_dir"),
        ({"tensorboard": {"log_dir": "a\0b"}}, "TrainingConfig.tensorboard.log_dir.*without the character NUL"),
        ({"logs_dir": "C:\\logs"}, "TrainingConfig.logs_dir.*inside output_dir"),
        ({"logs_dir": "a/../../b"}, "TrainingConfig.logs_dir.*inside output_dir"),
        ({"task": "image2txt"}, r"TrainingConfig.task: got 'image2txt'. Did you mean 'image2text'\?"),
        ({"metrics": "accuracy, f1"}, r"Write metrics=\['accuracy', 'f1'\]"),
        ({"metrics": "Accuracy"}, "TrainingConfig.metrics: got 'Accuracy' .str.; it must be a list"),
        ({"metrics": [{"name": "cer", "n_decimals": -1}]}, "TrainingConfig.metrics: MetricConfig.n_decimals: got -1"),
        ({"save_steps": 2.5}, "TrainingConfig.save_steps: got 2.5 .float.; it must be a whole number >= 0, a fraction"),
        ({"save_steps": True}, "TrainingConfig.save_steps: got True"),
        ({"log_steps": 0}, "TrainingConfig.log_steps: got 0"),
        ({"max_steps": 1.5}, "TrainingConfig.max_steps: got 1.5"),
        ({"max_to_keep": 0}, "TrainingConfig.max_to_keep: got 0"),
        ({"mixed_precision": "fp8"}, "TrainingConfig.mixed_precision: got 'fp8'"),
        ({"dataloader_num_workers": -2}, "TrainingConfig.dataloader_num_workers: got -2"),
        ({"lr": float("nan")}, "TrainingConfig.lr: got nan"),
        ({"output_dir": ""}, "TrainingConfig.output_dir: got ''"),
        (
            {"eval_strategy": "often", "eval_steps": 3},
            "TrainingConfig.eval_strategy",
        ),  # no check of both where one is wrong
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        TrainingConfig(**settings)
    assert len(str(caught.value).splitlines()) == 1


def test_part_of_a_dict_is_completed() -> None:
    assert TrainingConfig(tensorboard={"log_dir": "x"}).tensorboard == {"log_dir": "x", "comment": ""}
    by_default = TrainingConfig(early_stopping={"patience": 2}).early_stopping
    assert by_default == {"monitor": "eval_epoch_metric", "patience": 2, "mode": "max"}
    by_name = TrainingConfig(early_stopping={"monitor": "eval_epoch_loss"}).early_stopping
    assert by_name == {"monitor": "eval_epoch_loss", "patience": 4, "mode": "auto"}


@pytest.mark.parametrize("off", [None, "no", "null", "None", False])
@pytest.mark.parametrize("name", ["early_stopping", "model_checkpoint", "tensorboard"])
def test_a_callback_is_switched_off_in_several_words(name: str, off: Any) -> None:
    assert getattr(TrainingConfig(**{name: off}), name) is None


@pytest.mark.parametrize(
    ("name", "word", "meaning"),
    [
        ("eval_strategy", "steps", "step"),
        ("eval_strategy", None, "no"),
        ("eval_strategy", False, "no"),
        ("eval_strategy", "null", "no"),
        ("max_steps", -1, None),
        ("max_steps", 1e3, 1000),
        ("max_steps", 1.0, 1.0),
        ("batch_size", 1e2, 100),
        ("mixed_precision", True, "bf16"),
        ("mixed_precision", False, "no"),
        ("mixed_precision", "full", "no"),
        ("mixed_precision", PrecisionType.FP16, "fp16"),
        ("optimizer", "sdg", "sgd"),
        ("optimizer", OptimizerType.SDG, "sgd"),
        ("task", TaskType.IMAGE2TEXT, "image2text"),
        ("lr_scheduler", LRSchedulerType.REDUCE_ON_PLATEAU, "reduce_on_plateau"),
        ("lr_scheduler_type", {"name_": "cosine"}, "cosine"),
        ("output_dir", Path("a/b"), "a/b"),
        ("tensorboard", {"log_dir": Path("logs")}, {"log_dir": "logs", "comment": ""}),
        ("batch_size", np.int64(3), 3),
        ("learning_rate", np.float32(0.5), 0.5),
        ("device_str", torch.device("cpu"), "cpu"),
        ("metrics", ("a", "b"), ["a", "b"]),
    ],
)
def test_values_have_other_spellings(name: str, word: Any, meaning: Any) -> None:
    also = {"eval_steps": 5} if word == "steps" else {}
    config = TrainingConfig(**{name: word}, **also)
    assert config[name] == meaning
    assert type(config.to_dict()[name]) in (str, int, float, list, dict, type(None))


def test_a_schedule_of_torchs_takes_the_place_of_the_default_schedule() -> None:
    config = TrainingConfig(lr_scheduler="cosine_anealing", lr_scheduler_kwargs={"T_max": 10})
    assert (config.lr_scheduler, config.lr_scheduler_type) == ("cosine_annealing", None)
    assert not config.is_set("lr_scheduler_type")
    assert TrainingConfig(lr_scheduler={"name_": "StepLR", "step_size": 2}, lr_scheduler_type=None).lr_scheduler
    config.update(lr_scheduler=None, lr_scheduler_kwargs=None)
    assert config.lr_scheduler_type == "linear"


def test_defaults_arguments_and_copies_of_a_metric_which_cannot_be_changed() -> None:
    config = MetricConfig("Accuracy", top_k=5, output_keys=["top"], n_decimals=2)
    assert (config.name, config.objective, config.output_keys, config.n_decimals) == ("Accuracy", None, ["top"], 2)
    for again in (eval(repr(config)), copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert again == config
        assert again.arguments == {"top_k": 5}
    assert config == MetricConfig(name="Accuracy", top_k=5, output_keys=["top"], n_decimals=2)
    assert config == MetricConfig(**config.to_dict())
    assert MetricConfig(name_="Accuracy") == MetricConfig("Accuracy") != config
    with pytest.raises(ValidationError, match="frozen"):
        config.name = "bleu"
    with pytest.raises(ConfigError):
        config.output_keys.append("rouge2")


def test_every_fault_of_a_metric_is_in_one_message() -> None:
    with pytest.raises(ConfigError) as caught:
        MetricConfig("cer", objective="up", n_decimals=-1, output_keys="cer")
    assert str(caught.value).splitlines() == [
        "MetricConfig.objective: got 'up' (str); it must be 'maximize', 'minimize' or None.",
        "MetricConfig.output_keys: got 'cer' (str); it must be a list of names, or None. Write output_keys=['cer'].",
        "MetricConfig.n_decimals: got -1 (int); it must be a whole number >= 0.",
    ]
    for values in ({}, {"nmae": "cer"}, {"name": 3}, {"name": ""}):
        with pytest.raises(ConfigError, match=r"MetricConfig\.name"):
            MetricConfig(**values)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("train.num_epochs", "write num_epochs=..."),
        ("optim.lr", "write learning_rate=..."),
        ("evaluation.eval_period", "write eval_steps=..."),
        ("train.evaluation.eval_period", "write eval_steps=..."),
        ("ema.decay", "Write ema={'decay': ...}."),
        ("a.b", "The settings have no sections."),
    ],
)
def test_a_name_with_dots_is_answered_with_the_setting(name: str, hint: str) -> None:
    for set_it in (lambda: TrainingConfig(**{name: 1}), lambda: TrainingConfig().update({name: 1})):
        with pytest.raises(ConfigKeyError, match=re.escape(f"TrainingConfig.{name}: no such setting.")) as raised:
            set_it()
        assert hint in str(raised.value)


@pytest.mark.parametrize(
    ("given", "hint"),
    [("out", "Write TrainingConfig(output_dir='out')."), ({"seed": 1}, "Write TrainingConfig(**settings)."), (3, "")],
)
def test_a_setting_without_a_name_is_refused_with_the_form(given: Any, hint: str) -> None:
    with pytest.raises(ConfigTypeError, match=r"TrainingConfig: got .* without a name") as raised:
        TrainingConfig(given)
    assert hint in str(raised.value)


def test_a_setting_is_written_as_in_a_dict() -> None:
    config = TrainingConfig()
    config["lr"] = 0.5
    assert config["learning_rate"] == config.learning_rate == 0.5
    with pytest.raises(ConfigKeyError, match="Did you mean 'seed'"):
        config["sede"] = 1
