"""Settings in files: what is written comes back; places and names are checked with the values, in one message."""

import copy
import inspect
import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainwright.config import (
    ConfigError,
    MetricConfig,
    MissingFileError,
    TrainerConfig,
    TrainingConfig,
    dump_default_yaml,
    get_config_help,
)
from trainwright.config.training.checked_config import CATEGORIES

# Some values of every field, none of which contradicts one of another field; the other value of each that is a bool.
FIELDS = TrainingConfig.model_fields.items()
VALUES: dict[str, list[Any]] = {name: [not field.default] for name, field in FIELDS if type(field.default) is bool} | {
    "output_dir": ["runs/1e-3", "~/runs", Path("a")],
    "eval_strategy": ["eval_epoch", "no", "epoch"],
    "eval_steps": [None],
    "batch_size": [1, 1024],
    "eval_batch_size": [None, -1, 3],
    "seed": [0, 2**63 - 1],
    "num_epochs": [1, 7],
    "dataloader_num_workers": [-1, 0, 2],
    "learning_rate": [1, 1e-5, 0.1, 1e-300],
    "metrics": [None, [], ["F1Score"], [{"name": "cer", "objective": "minimize"}, MetricConfig("Accuracy", top_k=2)]],
    "print_steps": [None, 1, 0.25],
    "early_stopping": [
        None,
        {"patience": 2},
        {"monitor": "epoch_loss", "mode": "min", "min_delta": 0.5, "baseline": 1},
    ],
    "model_checkpoint": [None, {"every_n_epoch": 2}, {"every_n_iteration": 5}],
    "tensorboard": [None, {"log_dir": "logs"}, {"comment": "null"}],
    "loss": [None, "MSELoss", {"name_": "CrossEntropyLoss", "label_smoothing": 0.1}],
    "optimizer": ["sgd", "AdamW", {"name_": "Adam", "betas": (0.8, 0.9), "eps": 1e-9}],
    "lr_scheduler_type": [None, "cosine", "linear"],
    "warmup_ratio": [0.0],
    "warmup_steps": [0],
    "device_str": [None, "cpu", "cuda:1"],
    "task": ["text_generation", "image2text"],
    "max_steps": [None, 10, 0.5, 1.0],
    "max_time": [None, "01:30:00", "00:12:00:00", 90, 0.5],
    "limit_train_batches": [None, 3, 0.5],
    "limit_eval_batches": [None, 3, 0.5],
    "overfit_batches": [None],
    "fast_dev_run": [True, False, 3],
    "hardest_samples": [None, 20],
    "deterministic": [True, False, "warn"],
    "bucket_by_length": [True, False, "length"],
    "shuffle_buffer": [None, 1000],
    "label_names": [None, ["start_positions", "end_positions"]],
    "resume_from_checkpoint": [None, True, False, "there", "no"],
    "init_weights_from": [None, "owner/name"],
    "weight_decay": [0.0, 0.01],
    "max_grad_norm": [None, 1.0],
    "clip_grad_value": [None],
    "gradient_accumulation_steps": [1, 4, {0: 1, 1000: 4}],
    "mixed_precision": [None, "no", "fp16", True],
    "lr_scheduler": [None],
    "lr_scheduler_kwargs": [None],
    "lr_scheduling_steps": [None, 3, 0.5],
    "loss_ignores": [None, 0, -1, [0, 255], "declared"],
    "non_finite": ["skip"],
    "metric_for_best_model": ["cer", "train.loss"],
    "greater_is_better": [None, True, False],
    "log_steps": [None, 10, 0.1, 1.0],
    "logs_dir": ["logs/here"],
    "float32_matmul_precision": [None, "highest", "high", "medium"],
    "trackers": [None, "wandb", ["mlflow", "trackio"], {"wandb": {"project": "digits"}, "mlflow": None}],
    "profile": [None, True, False, {}, {"wait": 0, "with_stack": True}],
    "ema": [
        None,
        True,
        False,
        {},
        {"decay": 0.9, "buffers": True},
        {"average": "equal", "start": 0.75, "every": 10},
        {"warmup": 2000},
        {"warmup": "timm", "gamma": 2.0, "power": 0.75},
    ],
    "save_steps": [None, 0, 10, 0.1, 1.0],
    "checkpoints_dir": ["saved"],
    "max_to_keep": [None, 3],
    "save_top_k": [None, 2],
    "save_best": [None, "accuracy", ["accuracy", "loss"], {"accuracy": None}, {"accuracy": "max", "loss": "min"}],
    "checkpoint_mirror": [None, "s3://bucket/run", "file:///mnt/run", "memory://run"],
    "unfreeze": [None, [{"epoch": 1, "layers": ["a"]}, {"step": 0.5, "layers": ["b", "c"]}]],
    "layer_decay": [None, 0.75],
    "eval_every_n_epoch": [None],
    "custom_pipeline_stage_id": [None, [0, 0, 1]],
    "graph_backend": ["aot_eager", "inductor"],
    "gradient_checkpointing": [True, False, "selective", "offload"],
    "zero_gather_precision": [None, "bf16"],
    "data_parallel_size": [None, 2],
    "tensor_parallel_size": [1, 2],
    "pipeline_parallel_size": [1, 2],
    "context_parallel_size": [1, 2],
    "expert_parallel_size": [1, 2],
    "zero_stage": [0, 1, 2, 3],
    "replicate_size": [None, 2],
    "pipeline_schedule": ["GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"],
    "hang_timeout_s": [None, 1800, 0.5],
}
TASK = {"output_dir": "out", "task": "text_generation"}
SCHEDULE = {"lr_scheduler": "step", "lr_scheduler_kwargs": {"step_size": 3}}


def assert_it_comes_back(config: TrainingConfig, folder: Path) -> None:
    kind = type(config)
    config.save_to_yaml(folder / "config.yaml")
    again = [kind.load_from_yaml(folder / "config.yaml"), kind(**config.to_dict()), eval(repr(config), globals())]
    again.append(kind(**TASK if kind is TrainerConfig else {}).load_from_yaml(folder / "config.yaml"))
    for other in again:
        assert other == config
    assert again[0].to_dict() == config.to_dict()
    assert repr(again[0]) == repr(config)


def test_values_of_every_field_are_tried_here() -> None:
    assert set(VALUES) == set(TrainingConfig.model_fields) == set(TrainerConfig.model_fields)


@pytest.mark.exhaustive(every=12)
@pytest.mark.parametrize("name", VALUES)
def test_a_value_of_any_field_comes_back(name: str, tmp_path: Path) -> None:
    has_own_default = name in inspect.get_annotations(TrainerConfig)  # the other fields are those of TrainingConfig
    for value in VALUES[name]:
        assert_it_comes_back(TrainingConfig(**{name: value}), tmp_path)
        if has_own_default:
            assert_it_comes_back(TrainerConfig(**{**TASK, name: value}), tmp_path)


@pytest.mark.exhaustive(every=6)
@pytest.mark.parametrize("seed", range(30))
def test_any_configuration_comes_back(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    settings = {name: draw.choice(values) for name, values in VALUES.items() if draw.random() < draw.choice([0.1, 0.9])}
    if isinstance(settings.get("gradient_accumulation_steps"), dict):  # a schedule goes with neither of these
        settings |= {"pipeline_parallel_size": 1, "elastic": False}
    assert_it_comes_back(TrainingConfig(**settings), tmp_path)
    assert_it_comes_back(TrainerConfig(**{**TASK, **settings}), tmp_path)


@pytest.mark.parametrize(
    "settings",
    [
        SCHEDULE,
        {"lr_scheduler": {"name_": "cyclic", "base_lr": 0.1, "max_lr": 0.2}},
        {"lr_scheduler_type": {"name_": "StepLR", "step_size": 2}},
        {"optimizer": {"name_": "SGD", "lr": 0.1}},
        {"eval_strategy": "step", "eval_steps": 5},
        {"lr_scheduler_type": "cosine", "warmup_ratio": 0.1, "warmup_steps": 3},
    ],
)
def test_what_goes_together_comes_back(settings: dict[str, Any], tmp_path: Path) -> None:
    assert_it_comes_back(TrainingConfig(**settings), tmp_path)
    assert_it_comes_back(TrainerConfig(**settings, **TASK), tmp_path)


def test_a_file_is_by_category(tmp_path: Path) -> None:
    dump_default_yaml(tmp_path / "config.yaml")
    content = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert list(content) == list(CATEGORIES)
    assert content["train"]["batch_size"] == 8
    assert content["learning"]["optimizer"] == "Adam"
    assert content["metrics"]["metrics"] == ["Accuracy"]
    assert content["callback"]["model_checkpoint"] == {"every_n_epoch": 1}
    assert content["device"]["device_str"] is None
    assert sum(map(len, content.values())) == len(TrainingConfig.model_fields)
    assert TrainingConfig.load_from_yaml(tmp_path / "config.yaml") == TrainingConfig()


STOPPING = {"monitor": "eval_epoch_metric", "patience": 4, "mode": "max"}  # the default


def test_what_the_user_wrote_is_set_also_if_it_is_the_default(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump({"callback": {"early_stopping": STOPPING}, "metrics": ["Accuracy"]}))
    by_hand = TrainingConfig.load_from_yaml(file)
    for config in (by_hand, TrainingConfig(early_stopping=STOPPING, metrics=["Accuracy"])):
        config.save_to_yaml(file)
        for again in (config, TrainingConfig.load_from_yaml(file), TrainingConfig.load(file), copy.deepcopy(config)):
            names = ("early_stopping", "metrics", "metric", "batch_size")
            assert [again.is_set(name) for name in names] == [True, True, True, False]
    file.write_text(file.read_text().replace("batch_size: 8", "batch_size: 9"))  # a saved file that is changed by hand
    assert TrainingConfig.load_from_yaml(file).is_set("batch_size")
    TrainingConfig(lr=0.1).save_to_yaml(file)
    saved = TrainingConfig.load_from_yaml(file)
    assert (saved.is_set("lr"), saved.is_set("early_stopping")) == (True, False)
    saved.update(SCHEDULE)  # the default schedule gives way
    assert saved.lr_scheduler_type is None


@pytest.mark.parametrize(
    "text",
    [
        "train: {epoch_num: 3}\nlearning: {lr: 5e-3}\nmetrics: {metric: F1Score}\ndevice: {device_str: cpu}\n",
        "epoch_num: 3\nlr: 5e-3\nmetric: F1Score\ndevice: cpu\n",
        "num_epochs: 3\nlearning: {lr: 5e-3}\nmetrics: [F1Score]\ndevice: {use_cpu: true}\ncallback:\n",
    ],
)
def test_a_file_by_hand_has_categories_or_not_and_any_names(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(text)
    expected = TrainingConfig(num_epochs=3, learning_rate=5e-3, metrics=["F1Score"], device="cpu")
    assert TrainingConfig.load_from_yaml(tmp_path / "config.yaml") == expected


def test_loading_into_a_configuration_changes_that_one(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("train: {batch_size: 4, seed: 42}\n")
    config = TrainingConfig(lr=0.1, seed=7)
    assert config.load_from_yaml(tmp_path / "config.yaml") is config
    assert config == TrainingConfig(lr=0.1, batch_size=4, seed=42)
    (tmp_path / "config.yaml").write_text("train: {batch_size: 0}\n")
    with pytest.raises(ConfigError, match=r"config\.yaml: TrainingConfig\.batch_size: got 0"):
        config.load_from_yaml(tmp_path / "config.yaml")
    assert config.batch_size == 4


def test_everything_wrong_with_a_file_is_in_one_message(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        "trian: {seed: 1}\ntrain: {batch_size: 0, batch_sise: 3, lr: fast}\nlearning: {seed: 3}\nsede: 3\nseed: 4\n"
    )
    with pytest.raises(ConfigError) as caught:
        TrainingConfig.load_from_yaml(path)
    lines = str(caught.value).splitlines()
    assert all(line.startswith(f"{path}: ") for line in lines)
    said = [line.removeprefix(f"{path}: ") for line in lines]
    assert set(said) == {
        "trian: no such category or setting. Did you mean 'train'?",
        "train.batch_sise: no such setting. Did you mean 'batch_size'?",
        "train.lr: lr is not in this category. Did you mean 'learning.lr'?",
        "learning.seed: seed is not in this category. Did you mean 'train.seed'?",
        "seed: got 4, and elsewhere in the file 3. Give one of them.",
        "TrainingConfig.sede: no such setting. Did you mean 'seed'?",
        "TrainingConfig.batch_size: got 0 (int); it must be a whole number >= 1.",
        "TrainingConfig.lr: got 'fast' (str); it must be a number > 0.",
    }


def test_a_category_that_is_no_mapping_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("train: 3\n")
    with pytest.raises(ConfigError, match="train: got 3; a category holds settings"):
        TrainingConfig.load_from_yaml(tmp_path / "config.yaml")
    (tmp_path / "config.yaml").write_text("warmup_steps: false\n")  # equals the default, and is checked all the same
    with pytest.raises(ConfigError, match="warmup_steps: got False"):
        TrainingConfig.load_from_yaml(tmp_path / "config.yaml")
    with pytest.raises(MissingFileError, match=r"nothing\.yaml"):
        TrainingConfig.load_from_yaml(tmp_path / "nothing.yaml")


def test_what_yaml_cannot_hold_is_an_error_that_names_it(tmp_path: Path) -> None:
    config = TrainingConfig(lr_scheduler="lambda", lr_scheduler_kwargs={"lr_lambda": abs})
    with pytest.raises(ConfigError, match=r"TrainingConfig\.lr_scheduler_kwargs: got .*YAML file cannot hold"):
        config.save_to_yaml(tmp_path / "config.yaml")
    assert not (tmp_path / "config.yaml").exists()


def test_saving_into_and_loading_from_a_folder(tmp_path: Path) -> None:
    config = TrainerConfig(task="image2text", output_dir="out", metrics=["cer"])
    assert config.save(tmp_path / "new") == tmp_path / "new" / "train_config.yaml"
    assert TrainerConfig.load(tmp_path / "new") == config
    assert TrainerConfig.load(tmp_path / "new" / "train_config.yaml", lr=0.1) == config.copy_with(lr=0.1)
    config.save(tmp_path, filename="other.yaml")
    assert TrainerConfig.load(tmp_path, "other.yaml", metric="wer").metrics == ["wer"]
    with pytest.raises(MissingFileError, match=r"train_config\.yaml"):
        TrainerConfig.load(tmp_path)


def test_help_describes_all_settings(capsys: pytest.CaptureFixture[str]) -> None:
    described = get_config_help()
    printed = capsys.readouterr().out
    assert list(described) == list(TrainingConfig.model_fields)
    assert described["learning_rate"]["category"] == "learning"
    assert described["learning_rate"]["other_names"] == ["lr"]
    assert described["learning_rate"]["default"] == 5e-5
    for name, about in described.items():
        assert about["help"], name
        assert f"\n  {name}" in printed
        assert about["help"] in printed
    assert "default" not in get_config_help(TrainerConfig)["task"]
    assert "Required." in capsys.readouterr().out


def test_a_notebook_shows_what_differs_from_the_defaults_by_the_users_names() -> None:
    config = TrainingConfig(output_dir="<b>", lr=0.5, trackers={"wandb": {"api_key": "0123456789abcdef"}})
    html = config._repr_html_()
    assert "<b>TrainingConfig</b>" in html
    assert "lr</td><td>0.5<" in html
    assert "&lt;b&gt;" in html
    assert "0123456789abcdef" not in html
    assert f"{len(config.keys()) - 3} other settings have their defaults" in html
