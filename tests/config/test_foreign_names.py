"""Names of other libraries are accepted where they mean the same; else the message names ours, or none."""

import ast
import contextlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from trainwright import DefaultTrainer, Trainer, TrainingConfig
from trainwright.base.errors import ConfigKeyError, ConfigTypeError
from trainwright.cli.train import main
from trainwright.config.arguments import default_argument_parser
from trainwright.config.foreign_names import SETTINGS
from trainwright.config.key_hints import keys_by_name
from trainwright.config.lazy.lazy_config import get_config, try_get_key

CONFIG = """
from trainwright import LazyCall, get_config
import torch
model = LazyCall(torch.nn.Linear)(in_features=2, out_features=2)
dataloader = dict(train=LazyCall(torch.utils.data.DataLoader)(dataset=[1, 2]))
train = get_config("common/train.py").train
mine = dict(width=3)
"""


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("ema_decay", r"Here: ema=\{'decay': 0.999\}"),
        ("val_check_interval", "Here: eval_strategy='step'"),
        ("enable_checkpointing", "Here: save_enabled"),
        ("min_epochs", "of another library; there is no equivalent"),
        ("deepspeed", "Here: zero_stage=1, 2 or 3, with torchrun"),
        ("num_gpus", "Here: torchrun --nproc-per-node N SCRIPT"),
        ("checkpoint_hist", "Here: max_to_keep"),
        ("scheduler", "Here: lr_scheduler_type, or lr_scheduler"),
        ("label_smoothing_factor", "Here: loss="),
        ("bach_size", "Did you mean 'batch_size'"),
    ],
)
def test_an_unknown_setting_is_answered_with_ours(name: str, text: str) -> None:
    with pytest.raises(ConfigKeyError, match=text):
        TrainingConfig(**{name: 1})


PEERS = json.loads((Path(__file__).parent / "peer_names.json").read_text())
BEGINNINGS = ("nothing, ", "there is no equivalent", "a ", "the ", "logging.getLogger(", "apply_liger_kernel")
BEGINNINGS += ("Trainer(", "trainer.", "torch.", "torchrun ", "build_image_train_loader(", "prepare_input_batch(")
BEGINNINGS += ("create_train_dataloader(",)


@pytest.mark.parametrize("library", sorted(PEERS))
def test_each_setting_of_a_peer_is_accepted_or_answered_by_its_meaning(library: str) -> None:
    accepted = {*TrainingConfig.rows, *TrainingConfig.aliases}
    assert [name for name in PEERS[library] if name not in accepted and name not in SETTINGS] == []


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_each_answer_is_a_setting_with_a_value_that_it_takes(name: str) -> None:
    answer = SETTINGS[name]
    first = re.match(r"\w+", answer)
    accepted = {*TrainingConfig.rows, *TrainingConfig.aliases}
    assert answer.startswith(BEGINNINGS) or (first is not None and first[0] in accepted), answer
    named, _, value = answer.partition("=")
    if value and first is not None and named == first[0] and "..." not in value:
        also = {"eval_steps": 0.5} if named == "eval_strategy" else {}
        TrainingConfig(output_dir="run", **{named: literal(value)}, **also)


def literal(text: str) -> Any:
    """The value at the beginning of a text."""
    for end in range(1, len(text) + 1):
        if text[end : end + 1] in ("", ",", " ", ";"):
            with contextlib.suppress(SyntaxError, ValueError):
                return ast.literal_eval(text[:end])
    raise AssertionError(f"no value: {text}")


def test_a_name_that_nobody_knows_gets_the_nearest_ones() -> None:
    with pytest.raises(ConfigKeyError, match=r"The nearest names are (\w+, ){4}\w+; get_config_help\(\) describes all"):
        TrainingConfig(zzz=1)


def test_no_name_has_two_answers_and_each_answer_exists() -> None:
    fields = {*TrainingConfig.model_fields, *TrainingConfig.aliases}
    assert not fields & set(SETTINGS)
    defaults = get_config("common/defaults.py")
    for key in keys_by_name().values():
        section, _, _ = key.partition(".")
        if section == "train":
            assert try_get_key(defaults, key, default="absent") != "absent", key


def trainer(folder: Path) -> Trainer:
    data = TensorDataset(torch.randn(8, 2), torch.zeros(8, dtype=torch.long))
    return Trainer(torch.nn.Linear(2, 2), TrainingConfig(output_dir=folder), data)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("compute_metrics", "Trainer: there is no argument 'compute_metrics'. Here: metrics_handler."),
        ("max_epochs", r"It is a setting: TrainingConfig\(max_epochs=...\)."),
        ("bogus", "Trainer: there is no argument 'bogus'.$"),
    ],
)
def test_an_unknown_argument_of_a_trainer_is_answered_with_ours(name: str, text: str) -> None:
    with pytest.raises(ConfigTypeError, match=text):
        Trainer(torch.nn.Linear(2, 2), TrainingConfig(), [1, 2], **{name: 1})


@pytest.mark.parametrize("name", ["resume_from_checkpoint", "ckpt_path"])
def test_an_unknown_argument_of_train_is_answered_with_ours(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigTypeError, match=r"train: .* Here: TrainingConfig\(resume_from_checkpoint=True\)"):
        trainer(tmp_path).train(**{name: "last"})


def test_an_attribute_of_another_trainer_names_ours(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    ours = {"fit": "train()", "validate": "evaluate()", "test": "evaluate()", "global_step": "state.global_step"}
    for name, here in {**ours, "save_checkpoint": "save(path)", "args": "config"}.items():
        with pytest.raises(AttributeError, match=f"Trainer has no attribute '{name}'. Here it is: ") as error:
            getattr(made, name)
        assert here in str(error.value)
    with pytest.raises(AttributeError, match=r"object has no attribute 'something'$"):
        _ = made.something  # type: ignore[attr-defined]
    of_files = DefaultTrainer.__new__(DefaultTrainer)
    for name, here in {"evaluate": r"test\(cfg, loaders, model\)", "fit": r"train\(\)"}.items():
        with pytest.raises(AttributeError, match=f"Here it is: {here}"):
            getattr(of_files, name)


@pytest.mark.parametrize(
    ("flag", "text"),
    [("--lr=1e-3", "optim.lr"), ("--epochs", "train.train_epoch"), ("--batch-size", "train.train_micro_batch_size"),
     ("--train_iter", "train.train_iter"), ("--resum", "--resume")],
)  # fmt: skip
def test_an_unknown_flag_names_the_key(flag: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        default_argument_parser().parse_args(["--config-file", "c.py", flag])
    assert f"Did you mean '{text}'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "text"),
    [("lr=1e-3", "Did you mean 'optim.lr'"), ("optimizer.lr=3", "Did you mean 'optim.lr'"),
     ("train_iter=5", "Did you mean 'train.train_iter'"), ("something=5", "nothing reads it"),
     ("train.model_checkpoint.every_n_epoch=5", "TrainingConfig(model_checkpoint=...), and no key of train."),
     ("train.max_epochs=5", "Did you mean 'train.train_epoch'"),
     ("train.precison=bf16", "Did you mean 'train.amp.enabled'"), ("run/model_9", "--resume takes none")],
)  # fmt: skip
def test_an_override_that_nothing_reads_is_refused(
    override: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.py"
    file.write_text(CONFIG)
    assert main([str(file), override, f"train.output_dir={tmp_path / 'run'}"], prog="trainwright train") == 2
    assert text in capsys.readouterr().err
