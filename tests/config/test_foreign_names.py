"""Names of other libraries are accepted where they mean the same; else the message names ours, or none."""

import ast
import contextlib
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from omegaconf import OmegaConf
from torch.utils.data import TensorDataset

from trainwright import DefaultTrainer, LazyCall, LazyConfig, Trainer, TrainingConfig
from trainwright.base.errors import ConfigError, ConfigKeyError, ConfigTypeError
from trainwright.cli.sweep.values import read_values
from trainwright.cli.train import main
from trainwright.config.arguments import default_argument_parser
from trainwright.config.config_file.checks import _optimizer_faults, _setting_faults
from trainwright.config.foreign_names import INNER_KEYS, SETTINGS, VALUES
from trainwright.config.key_hints import keys_by_name
from trainwright.config.lazy.lazy_config import get_config, try_get_key
from trainwright.config.lazy.overrides import parse_override

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
BEGINNINGS = ("Leave it out: ", "there is no equivalent", "a ", "the ", "logging.getLogger(", "apply_liger_kernel")
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
    if text == "null":
        return None
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


def unchanged(value: Any) -> Any:
    """A value of Python as its text stands in the tables: 'true', '-1', 'torch.float16'."""
    if value.startswith("torch."):
        return getattr(torch, value.removeprefix("torch."))
    return {"true": True, "false": False}.get(value) if value in ("true", "false") else yaml.safe_load(value)


def refused(setting: str, value: Any) -> str:
    """The message of the Python API, or of config files, about a value; "" if it is accepted."""
    setting = f"optim.params.{setting}" if setting == "clip_grad_max_norm" else setting
    above, _, inner = setting.partition(".")
    try:
        if above in ("train", "optim"):
            cfg = get_config("common/defaults.py")
            OmegaConf.update(cfg, setting, value, merge=False)
            faults = [str(one) for one in (*_setting_faults(cfg), *_optimizer_faults(cfg))]
            return "\n".join(faults)
        TrainingConfig(**{above: {inner: value} if inner else value})
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("setting", sorted(VALUES))
def test_a_value_of_another_library_is_answered_by_what_to_write(setting: str) -> None:
    wrong = []
    for text, answer in VALUES[setting].items():
        value = unchanged(text)
        if not isinstance(value, torch.dtype | float) or setting == "mixed_precision":
            message = refused(setting, value)
            if message and answer not in message and "there is no equivalent" not in message:
                wrong.append((text, answer, message))
        line = re.match(r"([\w.]+)=", answer)
        if line is not None and "..." not in answer and answer.count("=") == 1:
            wrong += [(answer, said)] if (said := refused(line[1], literal(answer.partition("=")[2]))) else []
    assert wrong == []


@pytest.mark.parametrize(
    ("setting", "value", "text"),
    [
        ("ema", 0.999, "Write ema={'decay': 0.999}."), ("ema", "0.999", "Write ema={'decay': 0.999}."),
        ("train.ema", 0.999, "Write 'train.ema={decay: 0.999}'."),
        ("early_stopping", 3, "Write early_stopping={'patience': 3}."),
        ("train.early_stopping", 3, "Write 'train.early_stopping={patience: 3}'."),
        ("early_stopping", 0.01, "Write early_stopping={'min_delta': 0.01}."),
        ("early_stopping", "true", "Write early_stopping={'patience': 3}."),
        ("model_checkpoint", 2, "Write model_checkpoint={'every_n_epoch': 2}."),
        ("early_stopping", "eval_loss", "Write early_stopping={'monitor': 'eval_loss'}."),
        ("model_checkpoint", True, "Write model_checkpoint={'every_n_epoch': 1}."),
        ("tensorboard", "runs", "Write tensorboard={'log_dir': 'runs'}."),
        ("train.checkpointer", 100, "Write train.checkpointer.period=100."),
        ("train.zero_optimization", 2, "Write train.zero_optimization.stage=2."),
        ("train.evaluation", False, "Write train.evaluation.enabled=False."),
        ("eval_strategy", 100, "Write eval_strategy='step', eval_steps=100."),
        ("warmup_ratio", 10, "For a number of updates write warmup_steps=10."),
        ("unfreeze", ["head"], "Write unfreeze=[{'epoch': 1, 'layers': ['head']}], with the epoch"),
        ("max_time", "5min", "Write max_time=300, in seconds."),
        ("train.max_time", "2h", "Write train.max_time=7200, in seconds."),
        ("gradient_accumulation_steps", {100: 4}, "that of key 0, is missing: write {0: 1, 100: 4}."),
        ("accumulate_grad_batches", {100: 4}, "that of key 0, is missing: write {0: 1, 100: 4}."),
        ("train.num_accumulation_steps", {"100": 4}, "that of key 0, is missing: write {0: 1, 100: 4}."),
        ("learning_rate", [1e-5, 1e-3], "For rates by depth set layer_decay=0.9; for others pass Trainer("),
        ("lr", slice(1e-5, 1e-3), "For rates by depth set layer_decay=0.9"),
        ("lr_scheduler_type", lambda step: 1.0, "pass a schedule to the trainer: Trainer(..., optimizer=optimizer, lr"),
        ("ema.warmup", 0.1, "It is a number of updates, such as 2000."),
        ("train.ema.warmup", 0.1, "It is a number of updates, such as 2000."),
        ("checkpoint_mirror", "/tmp/backup", "Write checkpoint_mirror='file:///tmp/backup'."),
        ("train.checkpointer.mirror", "/tmp/backup", "Write train.checkpointer.mirror=file:///tmp/backup."),
        ("train.train_iter", "10k", "Write 10000."), ("train.train_epoch", "5ep", "Write 5."),
        ("max_steps", "2M", "Write 2000000."), ("num_epochs", "3 epochs", "Write 3."),
        ("num_epochs", -1.0, "Set a large num_epochs, and max_time or early_stopping to end the run."),
        ("max_steps", "1000ba", "Write 1000."), ("eval_steps", "50 it", "Write 50."),
        ("eval_steps", "1k", "Write 1000."),
        ("train.evaluation.eval_period", "100 steps", "Write 100."), ("limit_train_batches", "10 batches", "Write 10."),
        ("max_time", "3 Days", "Write max_time=259200, in seconds."),
        ("hang_timeout_s", "5m", "Write hang_timeout_s=300, in seconds."),
        ("mixed_precision", "16-true", "model.to(torch.float16)"),
        ("train.amp", "bf16-true", "model.to(torch.bfloat16)"),
        ("tensorboard", True, "Leave it out: TensorBoard is on by default."),
        ("num_epochs", 2.5, "For a part of an epoch set max_steps."),
        ("train.amp", "bf16-mixed", "Write train.amp.enabled=True."),
    ],
)  # fmt: skip
def test_a_value_of_another_form_is_answered_by_what_to_write(setting: str, value: Any, text: str) -> None:
    assert text in refused(setting, value)


@pytest.mark.parametrize(
    ("setting", "value"),
    [("max_steps", "5ep"), ("num_epochs", "1000ba"), ("eval_steps", "2epochs"), ("train.train_iter", "2 epochs"),
     ("train.train_epoch", "100it"), ("batch_size", "5 steps"), ("gradient_accumulation_steps", "2ep"),
     ("max_time", "3 months"), ("max_time", "500ms"), ("max_time", "0s"), ("profile", 3), ("train.profile", 3),
     ("ema", 100), ("ema", 1.5), ("train.ema", 0.0), ("early_stopping", -1), ("early_stopping", "false")],
)  # fmt: skip
def test_a_value_of_another_unit_or_of_no_known_key_gets_no_line(setting: str, value: Any) -> None:
    message = refused(setting, value)
    assert "it must be " in message
    assert "Write" not in message


@pytest.mark.parametrize(
    ("setting", "value"),
    [("train.early_stopping", 3), ("train.early_stopping", 0.01), ("train.early_stopping", "eval_loss"),
     ("train.early_stopping", "the loss"), ("train.early_stopping", "null"), ("train.early_stopping", True),
     ("train.ema", 0.999), ("train.unfreeze", ["head"]), ("train.unfreeze", "a.0"),
     ("train.unfreeze", ["it's", 'a "b"']), ("train.unfreeze", {"epoch": 0.5, "layers": ["head"]}),
     ("train.checkpointer", 100), ("train.zero_optimization", 2), ("train.evaluation", False),
     ("train.checkpointer.mirror", "/tmp/back up"), ("train.max_time", "2h"), ("train.max_time", -1),
     ("train.checkpointer.max_to_keep", "all"), ("train.amp", "bf16-mixed"), ("train.profile", "simple")],
)  # fmt: skip
def test_the_line_for_a_key_of_config_files_is_an_override_that_a_shell_takes(setting: str, value: Any) -> None:
    message = refused(setting, value)
    line = re.search(r"Write (.+?)(?:, with|, in seconds|\.$)", message)
    assert line is not None, message
    (text,) = shlex.split(line[1])
    override = parse_override(text)
    assert refused(override.key_or_group, override.value()) == "", message


@pytest.mark.parametrize(
    ("given", "line"),
    [("quniform(0,1,0.1)", "uniform(0,1)"), ("suggest_float('lr',0.1,1)", "uniform(0,1)"),
     ("suggest_uniform(0.1, 2)", "uniform(0.1,2)"), ("suggest_uniform(2,1)", "uniform(0,1)"),
     ("loguniform(1e-5,1e-2)", "log(1e-5,1e-2)"), ("log_uniform(-9,-2)", "log(1e-4,1e-1)"),
     ("randint(1,10)", "int(1,10)"), ("randint(0.5,2)", "int(1,8)"), ("randint(10)", "int(1,8)"),
     ("grid_search([0.1,0.01])", "choice(0.1,0.01)"), ("categorical(a,b)", "choice(a,b)"),
     ("categorical(['a', 'b'])", "choice('a','b')"), ("categorical([[1,2],[3]])", "choice(1,2)"),
     ("suggest_categorical('lr',[0.1,1])", "choice(1,2)"), ("grid_search([])", "choice(1,2)"),
     ("grid_search([None,3600])", "choice(1,2)"), ("categorical(['a b','c, d'])", "choice(1,2)"),
     ("categorical(a=1,b=2)", "choice(1,2)")],
)  # fmt: skip
def test_the_draw_of_another_search_is_answered_with_one_that_is_read(given: str, line: str) -> None:
    with pytest.raises(ConfigError, match="there is no function") as raised:
        parse_override(f"optim.lr={given}")
    written = re.search(r"Write (.+), with --trials N\.", str(raised.value))
    assert written is not None
    (text,) = shlex.split(written[1])
    assert text == f"optim.lr={line}"
    values = read_values([text])
    assert values.keys == ["optim.lr"]
    assert all(len(texts) > 1 for texts in values.choices.values())


@pytest.mark.parametrize(
    ("name", "line"),
    [("optimizer.lr", "write lr=..."), ("optimizer.weight_decay", "write weight_decay=..."),
     ("lr_scheduler.warmup_ratio", "write warmup_ratio=..."), ("loss.reduction", "{'name_': ..., 'reduction': ...}"),
     ("optimizer.betas", "Write optimizer={'name_': ..., 'betas': ...}."),
     ("optimizer.name_", "Write optimizer={'name_': ...}."), ("optimizer.name", "Write optimizer={'name_': ...}."),
     ("loss.type", "Write loss={'name_': ...}.")],
)  # fmt: skip
def test_an_argument_of_a_named_object_is_its_setting_or_beside_its_name(name: str, line: str) -> None:
    with pytest.raises(ConfigKeyError, match=re.escape(line)):
        TrainingConfig(**{name: 0.1})


@pytest.mark.parametrize("value", [-1.0, 0.0, -2.5])
def test_a_number_of_epochs_that_is_none_is_no_part_of_an_epoch(value: float) -> None:
    assert "part of an epoch" not in refused("num_epochs", value)


@pytest.mark.parametrize("section", sorted(INNER_KEYS))
def test_a_key_inside_a_setting_is_answered_with_ours(section: str) -> None:
    above = "train." if section == "amp" else ""
    allowed = re.compile(r"\w+")
    for name, here in INNER_KEYS[section].items():
        said = here if here.startswith("Leave it out") else f"Here: {here}"
        assert f"{section}.{name}: no such key. {said}." in refused(f"{above}{section}.{name}", "x")
        assert allowed.match(here)


def test_a_key_with_a_dot_is_answered_in_the_form_of_its_place(tmp_path: Path) -> None:
    with pytest.raises(ConfigKeyError, match=r"Write early_stopping=\{'monitor': ...\}"):
        TrainingConfig(**{"early_stopping.metric": "x"})
    file = tmp_path / "config.yaml"
    for text in ("early_stopping.metric: x", "callback:\n  early_stopping.metric: x", "train.early_stopping.metric: x"):
        file.write_text(text)
        with pytest.raises(ConfigKeyError, match=r"Write early_stopping: \{monitor: ...\}"):
            TrainingConfig.load(file)


PAIRS = TensorDataset(torch.randn(8, 2), torch.zeros(8, dtype=torch.long))


def trainer(folder: Path) -> Trainer:
    return Trainer(torch.nn.Linear(2, 2), TrainingConfig(output_dir=folder), PAIRS)


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


@pytest.mark.parametrize(
    ("method", "given", "text"),
    [
        (
            "predict",
            {"data": PAIRS, "batch_size": 4},
            "'batch_size'. Here: .*eval_batch_size",
        ),
        (
            "predict",
            {},
            r"argument: 'data'. The call is Trainer.predict\(data, \*, iterate=False\).",
        ),
        ("evaluate", {"eval_dataset": PAIRS}, "Here: the first argument."),
        ("evaluate", {"num_workers": 2, "data": PAIRS}, "dataloader_num_workers.*'data'. Did you mean 'dataset'"),
        ("train", {"max_epochs": 3}, r"It is a setting: TrainingConfig\(max_epochs=...\)"),
    ],
)
def test_an_argument_that_a_method_does_not_have_is_answered(
    method: str, given: dict[str, Any], text: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigTypeError, match=text):
        getattr(trainer(tmp_path), method)(**given)


@pytest.mark.parametrize(
    ("arguments", "given", "text"),
    [
        ((), {"model": 1}, r"'model'. It is in the configuration: model. Write DefaultTrainer\(LazyConfig.load"),
        (({},), {"optimizer": 1, "callbacks": []}, r": optim\. .*: train\.callbacks\. Write"),
        (({}, []), {}, "too many positional arguments. Write"),
        ((), {"config": {}}, "Did you mean 'cfg'"),
    ],
)
def test_an_argument_that_a_default_trainer_does_not_have_is_answered(
    arguments: tuple[Any, ...], given: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigTypeError, match=f"DefaultTrainer: .*{text}"):
        DefaultTrainer(*arguments, **given)


def test_the_arguments_of_a_lazy_call_follow_it() -> None:
    for given, named in (((3,), {}), ((), {"width": 3})):
        with pytest.raises(ConfigTypeError, match=r"LazyCall: .*Write LazyCall\(Target\)\(...\): .* of their own"):
            LazyCall(torch.nn.Linear, *given, **named)


def test_an_argument_of_a_model_that_is_built_already_is_answered() -> None:
    cfg = OmegaConf.create({"model": torch.nn.Linear(2, 2)}, flags={"allow_objects": True})
    with pytest.raises(ConfigKeyError, match=r"an object of Linear, .* Write model = LazyCall\(Linear\)"):
        LazyConfig.apply_overrides(cfg, ["model.width=3"])


def test_files_that_mmengine_imports_are_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "config.py").write_text("_base_ = ['base.py']\nmodel = dict(a=1)")
    LazyConfig.load(tmp_path / "config.py")
    assert "_base_ is not read: it is of MMEngine" in caplog.text


def test_an_attribute_of_another_trainer_names_ours(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    ours = {"fit": "train()", "validate": "evaluate()", "test": "evaluate()", "global_step": "state.global_step"}
    for name, here in {**ours, "save_checkpoint": "save(path)", "args": "config"}.items():
        with pytest.raises(AttributeError, match=f"Trainer has no attribute '{name}'. Here it is: ") as error:
            getattr(made, name)
        assert here in str(error.value)
    with pytest.raises(AttributeError, match=r"object has no attribute 'something'$"):
        _ = made.something  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"has no attribute 'best_metric'. Here it is: best_checkpoint .*history"):
        _ = made.best_metric  # type: ignore[attr-defined]
    for name, here in {"log_history": "trainer.history", "best_metric": "trainer.best_checkpoint"}.items():
        with pytest.raises(AttributeError, match=f"TrainerState has no attribute '{name}'. Here it is: {here}"):
            getattr(made.state, name)
    with pytest.raises(AttributeError, match=r"object has no attribute 'something'$"):
        _ = made.state.something  # type: ignore[attr-defined]
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


@pytest.mark.parametrize("flag", ["--gpus", "--num-processes=2", "--n_gpu"])
def test_a_flag_of_processes_names_the_launcher(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        default_argument_parser().parse_args(["--config-file", "c.py", flag])
    assert "Here: torchrun --nproc-per-node N SCRIPT, or trainwright launch -n N." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "text"),
    [("lr=1e-3", "Did you mean 'optim.lr'"), ("optimizer.lr=3", "Did you mean 'optim.lr'"),
     ("train_iter=5", "Did you mean 'train.train_iter'"), ("something=5", "nothing reads it"),
     ("train.model_checkpoint.every_n_epoch=5", "TrainingConfig(model_checkpoint=...), and no key of train."),
     ("optim.lr:1e-3", "without spaces: optim.lr=1e-3"),
     ("optim.lr=loguniform(1e-4,1e-1)", "no function 'loguniform'. Write 'optim.lr=log(1e-4,1e-1)', with --trials N."),
     ("train.dist.num_nodes=2", "Start them with trainwright launch -n N, or torchrun."),
     ("train.warmup_iter=100", "a run computes it, from train.warmup_ratio"),
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
