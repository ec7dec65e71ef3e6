"""Every other name is read and written like its field; two names with different values are an error."""

import ast
import inspect
from types import ModuleType
from typing import Any

import pytest

from trainwright.config import ConfigError, TrainerConfig, TrainingConfig, settings
from trainwright.config.training import other_names

# name, field, a value of the name, the field's value for it
CASES = [
    ("epoch_num", "num_epochs", 3, 3),
    ("train_epoch", "num_epochs", 3, 3),
    ("train_micro_batch_size", "batch_size", 3, 3),
    ("train_batch_size", "batch_size", 3, 3),
    ("val_batch_size", "eval_batch_size", 3, 3),
    ("test_micro_batch_size", "eval_batch_size", 3, 3),
    ("lr", "learning_rate", 0.5, 0.5),
    ("num_accumulation_steps", "gradient_accumulation_steps", 3, 3),
    ("amp", "mixed_precision", "bf16", "bf16"),
    ("num_dataloader_workers", "dataloader_num_workers", 3, 3),
    ("log_period", "log_steps", 3, 3),
    ("load_weight", "init_weights_from", "here", "here"),
    ("eval_metric", "metric_for_best_model", "cer", "cer"),
    ("save_total_limit", "max_to_keep", 3, 3),
    ("num_train_epochs", "num_epochs", 3, 3),
    ("max_epochs", "num_epochs", 3, 3),
    ("epochs", "num_epochs", 3, 3),
    ("per_device_train_batch_size", "batch_size", 3, 3),
    ("per_device_eval_batch_size", "eval_batch_size", 3, 3),
    ("accumulate_grad_batches", "gradient_accumulation_steps", 3, 3),
    ("gradient_clip_val", "max_grad_norm", 0.5, 0.5),
    ("clip_grad_norm", "max_grad_norm", 0.5, 0.5),
    ("evaluation_strategy", "eval_strategy", "no", "no"),
    ("logging_steps", "log_steps", 3, 3),
    ("log_every_n_steps", "log_steps", 3, 3),
    ("limit_val_batches", "limit_eval_batches", 0.5, 0.5),
    ("eval_after_n_epoch", "eval_every_n_epoch", 3, 3),
    ("check_val_every_n_epoch", "eval_every_n_epoch", 3, 3),
    ("filter_bias_and_bn", "decay_norm_and_bias", True, False),
    ("group_by_length", "bucket_by_length", True, True),
    ("metric", "metrics", "F1Score", ["F1Score"]),
    ("metric", "metrics", None, []),
    ("save_freq", "model_checkpoint", 3, {"every_n_epoch": 3}),
    ("save_freq", "model_checkpoint", 0, None),
    ("do_evaluate", "eval_strategy", False, "no"),
    ("do_evaluate", "eval_strategy", True, "epoch"),
    ("use_cpu", "device_str", True, "cpu"),
    ("use_cpu", "device_str", False, None),
]


def test_every_synonym_of_the_table_is_tried_here() -> None:
    assert {name for name, *_ in CASES} | {"device"} == set(TrainingConfig.aliases)  # `device` reads as a torch.device


@pytest.mark.parametrize("kind", [TrainingConfig, TrainerConfig])
@pytest.mark.parametrize(("name", "field", "value", "meaning"), CASES)
def test_a_synonym_is_read_and_written_like_its_field(
    kind: type[TrainingConfig], name: str, field: str, value: Any, meaning: Any
) -> None:
    needed = {"output_dir": "out", "task": "text_generation"} if kind is TrainerConfig else {}
    made = kind(**{name: value}, **needed)
    assert (made[name], made[field]) == (value, meaning)
    changed = kind(**needed)
    setattr(changed, name, value)
    assert changed == made == kind(**{field: meaning}, **needed)
    assert (getattr(changed, name), getattr(changed, field)) == (value, meaning)


@pytest.mark.parametrize(
    "settings",
    [
        {"lr": 0.1, "learning_rate": 0.2},
        {"epoch_num": 2, "train_epoch": 3},
        {"batch_size": 8, "train_micro_batch_size": 4},
        {"eval_batch_size": 8, "val_batch_size": -1},
        {"metric": "a", "metrics": ["b"]},
        {"metric": None, "metrics": ["b"]},
        {"metric": "a", "metrics": []},
        {"save_freq": 2, "model_checkpoint": {"every_n_epoch": 1}},
        {"save_freq": 1, "model_checkpoint": {"every_n_iteration": 1}},
        {"save_freq": 0, "model_checkpoint": {"every_n_epoch": 1}},
        {"do_evaluate": True, "eval_strategy": "no"},
        {"do_evaluate": False, "eval_strategy": "epoch"},
        {"use_cpu": True, "device": "cuda"},
        {"use_cpu": True, "device_str": "cuda:1"},
        {"device": "cpu", "device_str": "cuda"},
        {"max_to_keep": 2, "save_total_limit": 3},
    ],
)
def test_two_names_with_different_values_are_an_error_that_names_both(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="two names of one setting") as caught:
        TrainingConfig(**settings)
    for name in settings:
        assert name in str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [
        {"lr": 0.1, "learning_rate": 0.1},
        {"amp": True, "mixed_precision": "bf16"},
        {"eval_batch_size": None, "val_batch_size": -1},
        {"metric": "a", "metrics": ["a", "b"]},
        {"metric": {"name_": "a"}, "metrics": [{"name": "a"}, "b"]},
        {"save_freq": 0, "model_checkpoint": "no"},
        {"save_freq": 0, "model_checkpoint": {"every_n_iteration": 5}},
        {"do_evaluate": True, "eval_strategy": "step", "eval_steps": 3},
        {"do_evaluate": False, "eval_strategy": None},
        {"use_cpu": True, "device": "cpu:0"},
        {"use_cpu": False, "device": "cpu"},
    ],
)
def test_two_names_that_say_the_same_are_welcome(settings: dict[str, Any]) -> None:
    for order in (settings, dict(reversed(settings.items()))):
        assert TrainingConfig(**order) == TrainingConfig(**settings)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("save_freq", -1, "a whole number >= 0"),
        ("save_freq", True, "a whole number >= 0"),
        ("do_evaluate", "yes", "True or False"),
        ("use_cpu", 1, "True or False"),
        ("lr", "fast", "a number > 0"),
        ("metric", 3, "a list of names"),
    ],
)
def test_a_fault_uses_the_name_that_the_user_used(name: str, value: Any, allowed: str) -> None:
    with pytest.raises(ConfigError, match=rf"TrainingConfig\.{name}: got .*it must be {allowed}"):
        TrainingConfig(**{name: value})


def test_a_change_to_the_same_value_changes_nothing() -> None:
    config = TrainingConfig(eval_strategy="step", eval_steps=5, device="cpu")
    config.do_evaluate = True
    assert (config.eval_strategy, config.eval_steps) == ("step", 5)
    config.update(do_evaluate=False, eval_steps=None)
    assert config.eval_strategy == "no"
    config.do_evaluate = True
    assert config.eval_strategy == "epoch"
    config.use_cpu = False
    assert config.device_str == "cpu"


def test_type_checkers_see_each_alias() -> None:
    tree = ast.parse(inspect.getsource(other_names))
    (listed,) = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    names = [ast.unparse(node.target) for node in listed.body if isinstance(node, ast.AnnAssign)]
    assert names == [*TrainingConfig.aliases]
    assert other_names.OtherNames.model_fields == {}


def annotations(module: ModuleType) -> dict[str, str]:
    """Those of all attributes of classes in the source text of a module."""
    found = ast.walk(ast.parse(inspect.getsource(module)))
    return {
        node.target.id: ast.unparse(node.annotation)
        for node in found
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


def test_type_checkers_see_an_alias_with_the_type_of_its_setting() -> None:
    fields, aliases = annotations(settings), annotations(other_names)
    plain = {name: alias.field for name, alias in TrainingConfig.aliases.items() if alias.is_plain}
    assert {name: aliases[name] for name in plain if name != "device"} == {
        name: fields[field] for name, field in plain.items() if name != "device"
    }
