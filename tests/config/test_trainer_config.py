"""TrainerConfig: the fields and defaults of its page."""

from typing import Any

import pytest

from trainwright import TrainerConfig, TrainingConfig
from trainwright.config import ConfigError, LRSchedulerType, MetricConfig, OptimizerType, PrecisionType, TaskType


def test_the_pages_example_is_taken_as_it_is() -> None:
    config = TrainerConfig(
        output_dir="crnn-plate-fa-v1",
        task="image2text",
        device="cuda",
        init_weights_from="hezarai/crnn-base-fa-64x256",
        batch_size=8,
        num_epochs=20,
        metrics=["cer"],
        metric_for_best_model="cer",
    )
    assert repr(config) == (
        "TrainerConfig(output_dir='crnn-plate-fa-v1', batch_size=8, num_epochs=20, metrics=['cer'], device_str='cuda',"
        " task='image2text', init_weights_from='hezarai/crnn-base-fa-64x256', metric_for_best_model='cer')"
    )
    assert isinstance(config, TrainingConfig)
    assert eval(repr(config)) == config


@pytest.mark.parametrize(
    "settings",
    [
        {"init_weights_from": "hezarai/bert-base-fa"},
        {"resume_from_checkpoint": True},
        {"resume_from_checkpoint": True, "save_steps": 1000},
        {"mixed_precision": "bf16"},
        {"mixed_precision": "fp16"},
        {"mixed_precision": "full"},
        {"gradient_accumulation_steps": 8},
        {"distributed": True},
    ],
)
def test_the_pages_fragments_are_taken_as_they_are(settings: dict[str, Any]) -> None:
    config = TrainerConfig(output_dir="out", task="text_classification", **settings)
    assert {name: config.to_dict()[name] for name in settings} == {
        name: "no" if value == "full" else value for name, value in settings.items()
    }


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


def test_the_defaults_are_those_of_the_page() -> None:
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
        "TrainerConfig.output_dir: missing; give a path.",
        "TrainerConfig.task: missing; give the name of a task.",
        "TrainerConfig.lr: got 0 (int); it must be a number > 0.",
    }
    with pytest.raises(ConfigError, match=r"TrainerConfig.task: got 'text_clasification'. Did you mean 'text_classif"):
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


def test_it_says_its_kind_and_is_made_of_a_dict() -> None:
    config = TrainerConfig(output_dir="out", task="image2text", batch_size=3)
    assert (config.name, config.config_type) == ("trainer", "trainer")
    assert TrainerConfig.from_dict(config.to_dict()) == config
    assert TrainerConfig.from_dict(config.to_dict(), batch_size=5).batch_size == 5
