"""TrainingConfig: one name per setting, other spellings alike, every fault in one message."""

import copy
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError

from trainwright import TrainerConfig, TrainingConfig
from trainwright.base.errors import ConfigError, ConfigKeyError, ConfigTypeError
from trainwright.config import LRSchedulerType, MetricConfig, OptimizerType, PrecisionType, TaskType


def test_the_batch_size_of_evaluation_follows_that_of_training() -> None:
    config = TrainingConfig(batch_size=4, val_batch_size=-1)
    assert config.eval_batch_size == 4
    config.batch_size = 16
    assert config.eval_batch_size == 16
    config.eval_batch_size = 2
    assert config.val_batch_size == 2


def test_an_assignment_is_checked_and_changes_nothing_when_refused() -> None:
    config = TrainingConfig()
    with pytest.raises(ConfigError, match=r"TrainingConfig.batch_size: got '8' \(str\)"):
        config.batch_size = "8"  # type: ignore[assignment]
    with pytest.raises(ConfigKeyError, match="Did you mean 'batch_size'"):
        config.batch_sise = 4
    with pytest.raises(AttributeError, match="batch_sise"):
        config.batch_sise  # noqa: B018
    assert config == TrainingConfig()


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
    config.early_stopping = {"patience": 2}
    assert config.early_stopping["patience"] == 2
    assert config.optimizer["betas"] == [0.8, 0.9]


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
    assert config != other
    assert config != config.to_dict()
    assert config.copy_with(epoch_num=7).num_epochs == 7
    with pytest.raises(ConfigError, match="batch_size"):
        config.model_copy(update={"batch_size": 0})


def test_the_schema_has_the_allowed_values() -> None:
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
    assert list(stopping["properties"]) == ["monitor", "patience", "mode", "min_delta", "start", "baseline"]
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
    content = json.loads(
        config.copy_with(metrics=[MetricConfig("cer")], optimizer={"name_": "sgd", "lr": 0.1}).to_json_string()
    )
    assert list(content) == config.keys()
    assert content["metrics"] == [{"name": "cer"}]
    with pytest.raises(ValidationError, match="batch_size: got 0"):
        TrainingConfig.model_validate({"batch_size": 0})


# What a TrainingConfig shows of itself is what its page prints.


def test_other_settings_follow_where_they_differ_from_their_default() -> None:
    config = TrainingConfig(max_steps=5, weight_decay=0.0, metrics=["a", MetricConfig("b")], eval_batch_size=3)
    shown = repr(config)
    assert shown.endswith("freeze_bn=False, metrics=['a', MetricConfig(name='b')], max_steps=5)")
    assert ", val_batch_size=3, " in shown
    assert ", metric='a', " in shown


def test_the_summary_shows_what_differs_by_the_names_that_were_written() -> None:
    config = TrainingConfig(lr=0.1, metric="F1", num_epochs=3, batch_size=8)
    assert config.summary() == "TrainingConfig(num_epochs=3, lr=0.1, metric='F1')"
    config.update(val_batch_size=3)
    assert config.summary() == "TrainingConfig(val_batch_size=3, num_epochs=3, lr=0.1, metric='F1')"
    assert TrainingConfig().summary() == "TrainingConfig()"


# TrainerConfig: the fields and defaults of its page.


def test_every_parameter_of_the_page_is_taken_with_its_types() -> None:
    config = TrainerConfig(
        task=TaskType.TEXT_CLASSIFICATION, output_dir="out", device="cpu", num_epochs=2, init_weights_from="here",
        resume_from_checkpoint="there", max_steps=10, num_dataloader_workers=2, dataloader_shuffle=False, seed=1,
        optimizer=OptimizerType.ADAMW, learning_rate=1e-4, weight_decay=0.1, lr_scheduler=LRSchedulerType.STEP,
        lr_scheduler_kwargs={"step_size": 2}, batch_size=4, eval_batch_size=8, gradient_accumulation_steps=2,
        distributed=False, mixed_precision=PrecisionType.BF16, use_cpu=True, do_evaluate=True,
        evaluate_with_generate=False, metrics=["f1", MetricConfig("accuracy")], metric_for_best_model="evaluation.f1",
        save_steps=100, log_steps=10, checkpoints_dir="c", logs_dir="l",
    )  # fmt: skip
    same = TrainerConfig(**{**config.to_dict(), "optimizer": "adamw", "lr_scheduler": "step", "task": config.task})
    assert same == config
    assert (config.optimizer, config.lr_scheduler, config.mixed_precision) == ("adamw", "step", "bf16")


def test_trainer_config_has_the_defaults_of_its_page() -> None:
    config = TrainerConfig(output_dir="out", task="text_classification")
    assert (config.num_epochs, config.batch_size, config.eval_batch_size, config.learning_rate) == (1, 1, 1, 2e-5)
    assert (config.optimizer, config.num_dataloader_workers, config.seed, config.weight_decay) == ("adam", 4, 42, 0.0)
    assert (config.metrics, config.metric, config.metric_for_best_model) == (None, None, "loss")
    assert (config.lr_scheduler, config.lr_scheduler_type, config.loss, config.early_stopping) == (None,) * 4
    assert (config.log_steps, config.print_steps, config.save_steps, config.max_steps) == (None,) * 4
    assert (config.do_evaluate, config.evaluate_with_generate, config.save_enabled) == (True, True, True)
    assert (config.dataloader_drop_last, config.dataloader_shuffle, config.distributed) == (False, True, False)
    assert (config.checkpoints_dir, config.logs_dir, config.save_freq) == ("checkpoints", "logs", 1)


def test_task_and_output_dir_must_be_given_and_be_right() -> None:
    with pytest.raises(ConfigError) as caught:
        TrainerConfig(outputdir="x", lr=0)
    assert set(str(caught.value).splitlines()) == {
        "TrainerConfig.outputdir: no such setting. Did you mean 'output_dir'?",
        "TrainerConfig.output_dir: missing; give a path, not empty, without the character NUL, and with at most 255"
        " bytes between two slashes.",
        "TrainerConfig.task: missing; give the name of a task.",
        "TrainerConfig.lr: got 0 (int); it must be a number > 0.",
    }
    with pytest.raises(ConfigError, match=r"TrainerConfig.task: .*'text_clasification'.*'text_classif"):
        TrainerConfig(output_dir="x", task="text_clasification")
    with pytest.raises(ConfigError, match=r"TrainerConfig.task: got None"):
        TrainerConfig(output_dir="x", task=None)


def test_the_two_classes_have_the_same_settings() -> None:
    assert list(TrainerConfig.model_fields) == list(TrainingConfig.model_fields)
    for name, field in TrainerConfig.model_fields.items():
        base = TrainingConfig.model_fields[name]
        assert field.json_schema_extra == base.json_schema_extra
        if name != "task":
            assert (field.annotation, field.description) == (base.annotation, base.description)
    assert TrainerConfig.model_json_schema()["required"] == ["output_dir", "task"]
    config = TrainerConfig(output_dir="out", task="image2text", batch_size=3)
    assert (config.name, config.config_type) == ("trainer", "trainer")
    assert TrainerConfig.from_dict(config.to_dict(), batch_size=5) == config.copy_with(batch_size=5)
