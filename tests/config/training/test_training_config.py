"""TrainingConfig: one name per setting, other spellings alike, every fault in one message."""

import copy
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from trainwright import TrainingConfig
from trainwright.config import LRSchedulerType, MetricConfig, OptimizerType, PrecisionType, TaskType
from trainwright.config.errors import ConfigError, ConfigKeyError, ConfigTypeError


def test_the_defaults_are_those_of_the_page() -> None:
    config = TrainingConfig()
    assert (config.output_dir, config.epoch_num, config.batch_size, config.lr) == ("./output_dir", 2, 8, 5e-5)
    assert (config.optimizer, config.loss, config.lr_scheduler_type) == ("Adam", "CrossEntropyLoss", "linear")
    assert (config.seed, config.dataloader_drop_last, config.eval_strategy) == (42, True, "epoch")


def test_the_batch_size_of_evaluation_follows_that_of_training() -> None:
    config = TrainingConfig(batch_size=4, val_batch_size=-1)
    assert config.eval_batch_size == 4
    config.batch_size = 16
    assert config.eval_batch_size == 16
    config.eval_batch_size = 2
    assert config.val_batch_size == 2


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
    assert len(message.splitlines()) == 7


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"optimizer": {"name": "SGD"}}, "which lacks the key 'name_'"),
        ({"optimizer": {"name_": "SGD", "lr": 0.1}, "lr": 0.2}, "optimizer has lr=0.1"),
        ({"optimizer": "Adamm"}, r"TrainingConfig.optimizer: got 'Adamm'. Did you mean 'Adam'\?"),
        ({"optimizer": "LBFGS"}, "TrainingConfig.optimizer"),
        (
            {"optimizer": {"name_": "SGD", "momentun": 0.9}},
            r"SGD has no argument 'momentun'. Did you mean 'momentum'\?",
        ),
        ({"loss": "Crossentropy"}, "Did you mean 'CrossEntropyLoss'"),
        ({"loss": {"name_": "MSELoss", "reduction": "sum"}}, "must be the mean"),
        ({"lr_scheduler_type": "constant", "warmup_steps": 3}, "constant_with_warmup"),
        ({"eval_steps": 3}, "TrainingConfig.eval_steps"),
        ({"eval_strategy": "step"}, "TrainingConfig.eval_steps"),
        ({"device": "gpu7"}, "TrainingConfig.device: got 'gpu7'"),
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
        ({"lr_scheduler_type": {"name_": "cosine", "num_cycles": 2}}, "CosineAnnealingLR"),
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
        ({"logs_dir": "C:\\logs"}, "TrainingConfig.logs_dir.*inside output_dir"),
        ({"logs_dir": "a/../../b"}, "TrainingConfig.logs_dir.*inside output_dir"),
        ({"task": "image2txt"}, r"TrainingConfig.task: got 'image2txt'. Did you mean 'image2text'\?"),
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
    ],
)
def test_what_does_not_fit_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        TrainingConfig(**settings)
    assert len(str(caught.value).splitlines()) == 1


def test_an_assignment_is_checked_and_changes_nothing_when_refused() -> None:
    config = TrainingConfig()
    with pytest.raises(ConfigError, match=r"TrainingConfig.batch_size: got '8' \(str\)"):
        config.batch_size = "8"  # type: ignore[assignment]
    with pytest.raises(ConfigKeyError, match="Did you mean 'batch_size'"):
        config.batch_sise = 4
    with pytest.raises(AttributeError, match="batch_sise"):
        config.batch_sise  # noqa: B018
    assert config == TrainingConfig()


def test_a_check_of_several_settings_is_left_out_where_one_of_them_is_wrong_by_itself() -> None:
    with pytest.raises(ConfigError) as caught:
        TrainingConfig(eval_strategy="often", eval_steps=3)
    assert len(str(caught.value).splitlines()) == 1


def test_several_settings_change_together_or_not_at_all() -> None:
    config = TrainingConfig()
    with pytest.raises(ConfigError, match="eval_steps"):
        config.eval_strategy = "step"
    assert config.update({"eval_strategy": "step"}, eval_steps=10) is config
    assert (config.eval_strategy, config.eval_steps) == ("step", 10)
    with pytest.raises(ConfigError, match=r"TrainingConfig\.seed: got 'x'"):
        config.update(batch_size=3, seed="x")
    assert config.batch_size == 8


def test_what_a_setting_holds_is_not_changed_in_place() -> None:
    given = {"monitor": "epoch_loss", "mode": "min"}
    config = TrainingConfig(early_stopping=given, optimizer={"name_": "Adam", "betas": (0.8, 0.9)})
    given["mode"] = "max"
    assert config.early_stopping == {"monitor": "epoch_loss", "mode": "min", "patience": 4}
    for change in (
        lambda: config.early_stopping.update(patience=-1),
        lambda: config.early_stopping.pop("mode"),
        lambda: config.metrics.append("F1Score"),
        lambda: config.optimizer["betas"].clear(),
    ):
        with pytest.raises(ConfigTypeError, match="assign a new one"):
            change()
    config.early_stopping = {**config.early_stopping, "patience": 2}
    assert config.early_stopping["patience"] == 2
    assert config.optimizer["betas"] == [0.8, 0.9]


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
def test_a_value_may_be_said_in_other_words(name: str, word: Any, meaning: Any) -> None:
    also = {"eval_steps": 5} if word == "steps" else {}
    config = TrainingConfig(**{name: word}, **also)
    assert config[name] == meaning
    assert type(config.to_dict()[name]) in (str, int, float, list, dict)


def test_a_schedule_of_torchs_takes_the_place_of_the_default_schedule() -> None:
    config = TrainingConfig(lr_scheduler="cosine_anealing", lr_scheduler_kwargs={"T_max": 10})
    assert (config.lr_scheduler, config.lr_scheduler_type) == ("cosine_annealing", None)
    assert not config.is_set("lr_scheduler_type")
    assert TrainingConfig(lr_scheduler={"name_": "StepLR", "step_size": 2}, lr_scheduler_type=None).lr_scheduler
    config.update(lr_scheduler=None, lr_scheduler_kwargs=None)
    assert config.lr_scheduler_type == "linear"


def test_the_rate_of_an_optimizer_with_arguments_is_the_learning_rate() -> None:
    assert TrainingConfig(optimizer={"name_": "sgd", "lr": 0.1}).learning_rate == 0.1


def test_set_is_what_the_user_gave() -> None:
    config = TrainingConfig(lr=5e-5, metric="Accuracy")
    assert config.is_set("learning_rate")
    assert config.is_set("lr")
    assert config.is_set("metrics")
    assert not config.is_set("early_stopping")
    config.early_stopping = None
    assert config.is_set("early_stopping")


def test_workers_follow_the_machine_and_the_batch() -> None:
    config = TrainingConfig(dataloader_num_workers=-1, batch_size=3)
    assert config.dataloader_num_workers == min(os.cpu_count() or 1, 3)
    assert config.to_dict()["dataloader_num_workers"] == -1
    assert TrainingConfig(dataloader_num_workers=-1, batch_size=1000).dataloader_num_workers <= 8


def test_a_path_may_begin_at_home() -> None:
    config = TrainingConfig(output_dir="~/runs", init_weights_from=Path("~/w"), resume_from_checkpoint="~/r")
    home = os.path.expanduser("~")
    assert config.output_dir == f"{home}/runs"
    assert (config.init_weights_from, config.resume_from_checkpoint) == (f"{home}/w", f"{home}/r")


def test_it_reads_like_a_dict() -> None:
    config = TrainingConfig(lr=0.1)
    assert config["lr"] == config["learning_rate"] == config.get("lr") == 0.1
    assert config.get("nothing", 7) == 7
    assert "epoch_num" in config
    assert "nothing" not in config
    assert dict(config)["learning_rate"] == 0.1
    assert TrainingConfig(**config) == config
    with pytest.raises(KeyError, match="Did you mean 'batch_size'"):
        config["batch_sise"]


def _pickled(config: TrainingConfig) -> TrainingConfig:
    return pickle.loads(pickle.dumps(config))


@pytest.mark.parametrize(
    "copied",
    [copy.copy, copy.deepcopy, TrainingConfig.model_copy, TrainingConfig.copy_with, _pickled],
)
def test_a_copy_is_equal_and_its_own(copied: Callable[[TrainingConfig], TrainingConfig]) -> None:
    config = TrainingConfig(optimizer={"name_": "SGD", "momentum": 0.9}, metrics=[MetricConfig("cer", n_decimals=2)])
    other = copied(config)
    assert other == config
    assert other is not config
    assert (repr(other), other.model_fields_set) == (repr(config), config.model_fields_set)
    other.lr = 1.0
    assert config.lr == 5e-5


def test_a_copy_may_have_changes() -> None:
    config = TrainingConfig(lr=0.1)
    assert config.copy_with(epoch_num=7) == TrainingConfig(lr=0.1, num_epochs=7)
    assert config.num_epochs == 2
    with pytest.raises(ConfigError, match="batch_size"):
        config.model_copy(update={"batch_size": 0})


def test_equal_is_what_reads_alike() -> None:
    assert TrainingConfig(batch_size=4) == TrainingConfig(batch_size=4, eval_batch_size=4)
    assert TrainingConfig() != TrainingConfig(seed=1)
    assert TrainingConfig() != TrainingConfig().to_dict()


def test_the_schema_says_what_is_allowed() -> None:
    schema = TrainingConfig.model_json_schema()
    fields = schema["properties"]
    assert list(fields) == list(TrainingConfig().to_dict())
    assert schema["additionalProperties"] is False
    assert "required" not in schema
    assert fields["batch_size"] == {
        "type": "integer", "minimum": 1, "default": 8, "category": "train", "title": "Batch Size",
        "description": "Samples in a batch of one process.",
    }  # fmt: skip
    assert fields["learning_rate"]["exclusiveMinimum"] == 0
    assert fields["seed"]["exclusiveMaximum"] == 2**63
    assert fields["freeze_bn"]["type"] == "boolean"
    assert fields["eval_strategy"]["enum"] == ["epoch", "eval_epoch", "step", "no"]
    assert fields["task"]["anyOf"][0]["enum"] == [task.value for task in TaskType]
    assert [kind["type"] for kind in fields["save_steps"]["anyOf"]] == ["integer", "number", "null"]
    assert [kind.get("type") for kind in fields["optimizer"]["anyOf"]] == ["string", "object"]
    stopping = schema["$defs"][fields["early_stopping"]["anyOf"][0]["$ref"].rpartition("/")[2]]
    assert list(stopping["properties"]) == ["monitor", "patience", "mode", "min_delta", "baseline"]
    assert stopping["additionalProperties"] is False
    for name, field in fields.items():
        assert field["description"], name
        assert field["default"] == TrainingConfig().to_dict()[name]
        assert field["category"] in ("train", "learning", "metrics", "logging", "checkpoint", "callback", "device")
    json.dumps(schema)


def test_pydantic_reads_and_writes_it_too() -> None:
    config = TrainingConfig.model_validate({"lr": 0.1, "epoch_num": 3})
    assert config == TrainingConfig(lr=0.1, num_epochs=3)
    assert config.model_dump()["learning_rate"] == 0.1
    with pytest.raises(ValidationError, match="batch_size: got 0"):
        TrainingConfig.model_validate({"batch_size": 0})


def test_json_holds_every_setting() -> None:
    schedule = {"name_": "lambda", "lr_lambda": abs}
    config = TrainingConfig(metrics=[MetricConfig("cer")], lr_scheduler=schedule)
    content = json.loads(config.to_json_string())
    assert list(content) == config.keys()
    assert content["metrics"] == [{"name": "cer"}]


def test_the_benchmarks_way_of_making_one_works() -> None:
    for some in (None, 5):
        config = TrainingConfig(
            output_dir=Path("out"), num_epochs=3, batch_size=16, optimizer="adam", learning_rate=1e-3,
            gradient_accumulation_steps=2, mixed_precision="bf16" if some else None, num_dataloader_workers=2,
            log_steps=10, graph=False, seed=0, save_steps=some, save_freq=1 if some else 0, progress_bar=bool(some),
            max_steps=some, resume_from_checkpoint=Path("out") if some else None,
        )  # fmt: skip
        assert (config.save_steps, config.max_steps) == (some, some)
        assert config.model_checkpoint == ({"every_n_epoch": 1} if some else None)
        assert config.mixed_precision == ("bf16" if some else None)
        assert str(config.resume_from_checkpoint) == ("out" if some else "None")
        assert (config.num_epochs, config.batch_size, config.gradient_accumulation_steps) == (3, 16, 2)
