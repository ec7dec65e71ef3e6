"""TrainingConfig: one name per setting, other spellings alike, every fault in one message."""

from pathlib import Path
from typing import Any

import pytest
import torch

from trainwright import TrainingConfig
from trainwright.config.errors import ConfigError, ConfigKeyError


def test_the_defaults_are_those_of_the_page() -> None:
    config = TrainingConfig()
    assert (config.output_dir, config.epoch_num, config.batch_size, config.lr) == ("./output_dir", 2, 8, 5e-5)
    assert (config.optimizer, config.loss, config.lr_scheduler_type) == ("Adam", "CrossEntropyLoss", "linear")
    assert (config.seed, config.dataloader_drop_last, config.eval_strategy) == (42, True, "epoch")


@pytest.mark.parametrize(
    ("alias", "name", "value"),
    [
        ("epoch_num", "num_epochs", 3),
        ("train_micro_batch_size", "batch_size", 3),
        ("train_batch_size", "batch_size", 3),
        ("val_batch_size", "eval_batch_size", 3),
        ("lr", "learning_rate", 0.5),
        ("num_accumulation_steps", "gradient_accumulation_steps", 3),
        ("amp", "mixed_precision", "bf16"),
        ("num_dataloader_workers", "dataloader_num_workers", 3),
        ("log_period", "log_steps", 3),
        ("load_weight", "init_weights_from", "here"),
        ("device_str", "device_str", "cpu"),
    ],
)
def test_an_alias_is_read_and_written_like_the_name(alias: str, name: str, value: Any) -> None:
    made = TrainingConfig(**{alias: value})
    assert getattr(made, name) == getattr(made, alias) == value
    changed = TrainingConfig()
    setattr(changed, alias, value)
    assert changed == made


def test_the_batch_size_of_evaluation_follows_that_of_training() -> None:
    config = TrainingConfig(batch_size=4, val_batch_size=-1)
    assert config.eval_batch_size == 4
    config.batch_size = 16
    assert config.eval_batch_size == 16
    config.eval_batch_size = 2
    assert config.val_batch_size == 2


def test_the_device_is_a_torch_device() -> None:
    assert TrainingConfig(device="cpu").device == torch.device("cpu")
    assert TrainingConfig(device=torch.device("cpu")).device_str == "cpu"
    assert isinstance(TrainingConfig().device, torch.device)
    assert isinstance(TrainingConfig(device="cuda").device, torch.device)  # the CPU where there is no GPU


def test_every_fault_is_in_one_message() -> None:
    with pytest.raises(ConfigError) as caught:
        TrainingConfig(batch_size=0, lr="fast", epoch_num=True, warmup_ratio=2, eval_strategy="often", sede=1)
    message = str(caught.value)
    assert "TrainingConfig.batch_size: got 0 (int); it must be a whole number >= 1." in message
    assert "TrainingConfig.learning_rate: got 'fast' (str)" in message
    assert "TrainingConfig.num_epochs: got True (bool)" in message
    assert "TrainingConfig.warmup_ratio: got 2 (int); it must be a number in [0, 1]." in message
    assert "TrainingConfig.eval_strategy: got 'often' (str); it must be 'epoch', 'step' or 'no'." in message
    assert "TrainingConfig.sede: no such setting. Did you mean 'seed'?" in message
    assert len(message.splitlines()) == 6


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"lr": 0.1, "learning_rate": 0.2}, "two names of one"),
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
    ],
)
def test_what_does_not_fit_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        TrainingConfig(**settings)


def test_an_assignment_is_checked_and_changes_nothing_when_refused() -> None:
    config = TrainingConfig()
    with pytest.raises(ConfigError, match=r"TrainingConfig.batch_size: got '8' \(str\)"):
        config.batch_size = "8"  # type: ignore[assignment]
    with pytest.raises(ConfigKeyError, match="Did you mean 'batch_size'"):
        config.batch_sise = 4
    with pytest.raises(AttributeError, match="batch_sise"):
        config.batch_sise  # noqa: B018
    assert config == TrainingConfig()


def test_the_rate_of_an_optimizer_with_arguments_is_the_learning_rate() -> None:
    assert TrainingConfig(optimizer={"name_": "sgd", "lr": 0.1}).learning_rate == 0.1


def test_yaml_brings_back_what_was_written(tmp_path: Path) -> None:
    config = TrainingConfig(lr=1e-5, optimizer={"name_": "SGD", "momentum": 0.9}, device="cpu", max_steps=7)
    config.save_to_yaml(tmp_path / "config.yaml")
    assert TrainingConfig.load_from_yaml(tmp_path / "config.yaml") == config
    assert TrainingConfig(**config.to_dict()) == config
    (tmp_path / "by_hand.yaml").write_text("learning_rate: 5e-5\nepoch_num: 3\n")
    assert TrainingConfig.load_from_yaml(tmp_path / "by_hand.yaml") == TrainingConfig(num_epochs=3)
