"""Rules about settings: rows of one table for both APIs, whose messages have the names that the user gives them."""

import logging
import re
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from torch.optim.lr_scheduler import LinearLR, StepLR

from tests.toys import Classifier, file_config, points, quiet
from trainwright import DefaultTrainer, LazyCall, Trainer, TrainingConfig
from trainwright.base.errors import ConfigError
from trainwright.config.rules import RULES
from trainwright.optim import WarmupCosineLR
from trainwright.parallel.data_parallel import setup_dist_util

CONTRADICTIONS: list[tuple[dict[str, Any], str, str]] = [
    (
        {"clip_grad_value": 0.5, "max_grad_norm": 1.0},
        r"TrainingConfig\.clip_grad_value: got 0\.5 with max_grad_norm=1\.0: .*Set max_grad_norm=None",
        r"optim\.params\.clip_grad_value.*: got 0\.5 with optim\.params\.clip_grad_max_norm=1\.0: .*"
        r"Set optim\.params\.clip_grad_max_norm=None",
    ),
    (
        {"overfit_batches": 2, "limit_eval_batches": 3},
        r"TrainingConfig\.overfit_batches: got 2 with limit_eval_batches=3; it limits",
        r"train\.overfit_batches.*: got 2 with train\.limit_eval_batches=3; it limits",
    ),
    (
        {"ema": {"average": "equal", "decay": 0.9}},
        r"TrainingConfig\.ema: got average='equal' with decay=0\.9",
        r"train\.ema.*: got average='equal' with decay=0\.9",
    ),
    (
        {"ema": {"average": "equal", "warmup": 100}},
        r"TrainingConfig\.ema: got average='equal' with warmup=100",
        r"train\.ema.*: got average='equal' with warmup=100",
    ),
    (
        {"ema": {"warmup": 100, "power": 0.75}},
        r"TrainingConfig\.ema: got power=0\.75 with warmup=100\. It belongs",
        r"train\.ema.*: got power=0\.75 with warmup=100\. It belongs",
    ),
    (
        {"unfreeze": [{"layers": ["a"]}]},
        r"TrainingConfig\.unfreeze: got .* as item 0; give each one",
        r"train\.unfreeze.*: got .* as item 0; give each one",
    ),
]


def of_file(folder: Path, settings: dict[str, Any]) -> Any:
    cfg = file_config(folder, Classifier, points, LazyCall(points)(seed=1), train_iter=2, train_micro_batch_size=8)
    for name, value in settings.items():
        OmegaConf.update(cfg, TrainingConfig.rows[name].place, value)
    return cfg


@pytest.mark.parametrize(("settings", "in_python", "in_file"), CONTRADICTIONS, ids=lambda one: "")
def test_a_contradiction_is_refused_in_both_apis(
    settings: dict[str, Any], in_python: str, in_file: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as error:
        TrainingConfig(output_dir=str(tmp_path), **settings)
    assert re.match(in_python, str(error.value))
    with pytest.raises(ConfigError) as error:
        DefaultTrainer(of_file(tmp_path, settings))
    assert re.match(in_file, str(error.value))


def test_a_change_is_checked_by_the_same_rules(tmp_path: Path) -> None:
    config = TrainingConfig(output_dir=str(tmp_path), gradient_clip_val=2.0)
    with pytest.raises(ConfigError, match="clip by value or by norm"):
        config.clip_grad_value = 0.5
    assert config.clip_grad_value is None


def test_a_value_with_a_fault_of_its_own_has_no_second_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        TrainingConfig(output_dir=str(tmp_path), clip_grad_value=-1, max_grad_norm=1.0)
    assert len(str(error.value).splitlines()) == 1
    cfg = of_file(tmp_path, {"clip_grad_value": -1, "max_grad_norm": 1.0})
    with pytest.raises(ConfigError) as error:
        DefaultTrainer(cfg)
    assert "must be" in str(error.value)
    assert "not by both" not in str(error.value)


def test_each_rule_is_about_settings_of_the_table() -> None:
    assert RULES
    for row in RULES:
        assert set(row.settings) <= set(TrainingConfig.model_fields)
        has_place = bool(TrainingConfig.rows[row.settings[0]].place)
        assert row.api == "Python" or has_place


@pytest.mark.parametrize(
    ("settings", "text", "names"),
    [
        ({"compile_blocks": True, "graph": True}, "True has no effect", ("compile_blocks", "graph")),
        (
            {"compile_blocks": True, "gradient_checkpointing": "offload"},
            "'offload' has the effect of True",
            ("gradient_checkpointing", "compile_blocks"),
        ),
    ],
)
def test_a_setting_without_effect_is_a_warning_of_the_start(
    settings: dict[str, Any], text: str, names: tuple[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = names
    with caplog.at_level(logging.WARNING, logger="trainwright"):
        Trainer(Classifier(), quiet(tmp_path / "a", **settings), points())
    assert f"TrainingConfig.{first}: {text}: {second}=True" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="trainwright"):
        DefaultTrainer(of_file(tmp_path / "b", settings))
    rows = TrainingConfig.rows
    assert f"{rows[first].place}: {text}: {rows[second].place}=True" in caplog.text


def test_partial_weights_need_a_place_to_come_from(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = {"init_weights_partial": True}
    with caplog.at_level(logging.WARNING, logger="trainwright"):
        Trainer(Classifier(), quiet(tmp_path / "a", **settings), points())
        DefaultTrainer(of_file(tmp_path / "b", settings))
    assert "TrainingConfig.init_weights_partial: True has no effect without init_weights_from." in caplog.text
    place = TrainingConfig.rows["init_weights_partial"].place
    assert f"{place}: True has no effect without train.load_weight." in caplog.text


@pytest.mark.parametrize(
    ("schedule", "has_effect"),
    [
        (LazyCall(StepLR)(step_size=2), False),
        (LazyCall(WarmupCosineLR)(warmup_factor=0.1), True),
        (LazyCall(LinearLR)(total_iters=4, start_factor="${train.warmup_ratio}"), True),
    ],
)
def test_a_warm_up_of_a_schedule_that_has_none_is_a_warning(
    schedule: Any, has_effect: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cfg = file_config(tmp_path, Classifier, points, train_iter=4, train_micro_batch_size=4, warmup_ratio=0.5)
    cfg.train.scheduler = schedule
    with caplog.at_level(logging.WARNING, logger="trainwright"):
        trainer = DefaultTrainer(cfg)
    assert ("train.warmup_ratio: 0.5 has no effect: train.scheduler" in caplog.text) is not has_effect
    first = [trainer.optimizer.param_groups[0]["lr"]]
    for _ in range(2):
        trainer.lr_scheduler.optimizer.step()
        trainer.lr_scheduler.step()
        first.append(trainer.optimizer.param_groups[0]["lr"])
    assert (first[0] < first[1] < first[2]) is has_effect


def test_one_device_for_several_processes_is_refused_before_they_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"train\.dist\.device_type: got 'cuda:1', one device, for 2 processes"):
        setup_dist_util({"device_type": "cuda:1"})
