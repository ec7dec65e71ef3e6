"""What is complete, checked and written before a training from a configuration begins."""

import logging
import subprocess
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from omegaconf import DictConfig
from torch.utils.data import SequentialSampler

from tests.fork_server import python
from tests.toys import Classifier, Samples, Squares, file_config, points
from trainwright import DefaultTrainer, LazyCall, get_config
from trainwright.checkpoint.errors import CheckpointError
from trainwright.cli.train import build_evaluation
from trainwright.config import ConfigError, LazyConfig
from trainwright.config_trainer import setup
from trainwright.config_trainer.setup import bind_arguments
from trainwright.data import build_image_test_loader
from trainwright.engine import default_setup
from trainwright.hooks import HookBase
from trainwright.parallel.layout import Layout

SIZES = ("train_micro_batch_size", "global_batch_size", "num_accumulation_steps")


def rows() -> Samples:
    return Samples(x=torch.ones(8, 4))


def config(folder: Path, **train: Any) -> DictConfig:
    return file_config(folder / "run", Squares, rows, **train)


def sizes(train: Any) -> tuple[Any, ...]:
    return (*(train[name] for name in SIZES), train["dist"]["data_parallel_size"])


@pytest.mark.parametrize(
    ("ranks", "given", "complete"),
    [
        (1, {"train_micro_batch_size": 4}, (4, 4, 1)),
        (2, {"train_micro_batch_size": 4}, (4, 8, 1)),
        (2, {"train_micro_batch_size": 4, "global_batch_size": 24}, (4, 24, 3)),
        (2, {"train_micro_batch_size": None, "global_batch_size": 24, "num_accumulation_steps": 3}, (4, 24, 3)),
        # Completed by a run on four processes: the global batch stays.
        (
            2,
            {
                "train_micro_batch_size": 4,
                "global_batch_size": 16,
                "num_accumulation_steps": 1,
                "dist": {"data_parallel_size": 4},
            },
            (4, 16, 2),
        ),
    ],
)
def test_batch_sizes_are_completed_in_the_configuration_and_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, given: dict[str, Any], complete: tuple[int, ...]
) -> None:
    monkeypatch.setattr(setup, "get_data_parallel_size", lambda: ranks)
    cfg = config(tmp_path, **given)
    default_setup(cfg, Namespace())
    assert sizes(cfg.train) == (*complete, ranks)
    assert sizes(yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["train"]) == (*complete, ranks)


@pytest.mark.parametrize(
    "given",
    [
        {"train_micro_batch_size": 4, "global_batch_size": 6},
        {"train_micro_batch_size": 4, "global_batch_size": 8, "num_accumulation_steps": 3},
        {"train_micro_batch_size": None, "global_batch_size": None},
    ],
)
def test_batch_sizes_that_do_not_fit_are_refused_before_anything_is_written(
    tmp_path: Path, given: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match="train_micro_batch_size"):
        default_setup(config(tmp_path, **given))
    assert not list(tmp_path.iterdir())


def test_a_folder_whose_name_looks_like_an_interpolation_is_one_like_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a${b}c"
    folder.mkdir()
    monkeypatch.chdir(folder)
    cfg = config(folder)
    cfg.train.output_dir = str(folder / "run").replace("${", "\\${")
    (folder / "config.py").touch()
    default_setup(cfg, Namespace(config_file=str(tmp_path / "a${b}c" / "config.py")))
    default_setup(cfg, Namespace(config_file=str(tmp_path / "a${b}c" / "config.py")))
    assert cfg.train.output_dir == str(folder / "run")
    assert LazyConfig.load(folder / "run" / "config.yaml").train.output_dir == str(folder / "run")


@pytest.mark.parametrize(
    ("run_step", "expected"),
    [
        (lambda get_batch, input_placement_device: (get_batch, input_placement_device), ("batch", "cpu")),
        (lambda get_batch: (get_batch,), ("batch",)),
        (lambda: (), ()),
        (lambda *args: args, ("batch", "cpu")),
    ],
)
def test_a_step_gets_the_arguments_it_takes(run_step: Any, expected: tuple[Any, ...]) -> None:
    assert bind_arguments(run_step, "batch", "cpu")() == expected


@dataclass
class Processes:
    layout: Layout


def test_the_layout_is_written_into_the_configuration(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(setup, "get_world_size", lambda: 8)
    custom = (0, 0, 0, 1, 2, 3, 3, 3)
    monkeypatch.setattr(setup, "current_mesh", lambda: Processes(Layout(2, pipeline=4, custom_stage_ids=custom)))
    monkeypatch.setattr(setup, "get_data_parallel_size", lambda: 2)
    cfg = get_config("common/defaults.py")
    cfg.train.dist.update(num_nodes=1, pipeline_num_layers=8)
    setup.complete_batch_sizes(cfg)
    dist = cfg.train.dist
    assert (dist.num_nodes, dist.num_gpus_per_node) == (2, 4)
    assert (dist.auto_pipeline_stage_id, dist.actual_pipeline_stage_id) == ([0, 0, 1, 1, 2, 2, 2, 3], list(custom))
    assert caplog.messages == ["train.dist.num_nodes: the configuration has 1, this run has 2."]
    with pytest.raises(ConfigError, match=r"pipeline_num_layers: got 8, .* 6 layers"):
        setup.check_num_layers(dist, [0, 0, 1, 1, 2, 3])


@pytest.mark.parametrize(
    ("length", "shown"), [({"train_epoch": 3}, "train.train_epoch=6"), ({"train_iter": 5}, "train.train_iter=10")]
)
def test_the_command_to_train_longer_has_the_setting_of_the_user(
    length: dict[str, int], shown: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    cfg = config(tmp_path, train_micro_batch_size=4, **length)
    cfg.train.evaluation.enabled = False
    cfg.project_root = str(tmp_path)
    DefaultTrainer(cfg).train()
    assert f"config.yaml --resume {shown}\n" in f"{caplog.text}\n"


START = """
import sys
from torch import nn
from tests.fork_server import python
from trainwright import DefaultTrainer, LazyCall, get_config
from trainwright.data import build_image_train_loader
from trainwright.engine import default_setup
cfg = get_config("common/defaults.py")
cfg.model = LazyCall(nn.Linear)(in_features=2, out_features=2)
cfg.dataloader = {"train": LazyCall(build_image_train_loader)(dataset=[[0] * 32], num_workers=0)}
cfg.train.update({"output_dir": sys.argv[1], "train_iter": 1, "zero_optimization": {"enabled": False, "stage": 2}})
cfg.train.evaluation.enabled = False
if "default_setup" in sys.argv:
    default_setup(cfg)
DefaultTrainer(cfg)
"""


@pytest.mark.parametrize("arguments", [(), ("default_setup",)])
def test_a_warning_of_the_start_is_logged_once_with_its_level(arguments: tuple[str, ...], tmp_path: Path) -> None:
    command = [python(), "-c", START, str(tmp_path / "run"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    (line,) = [line for line in (done.stdout + done.stderr).splitlines() if "zero_optimization.stage" in line]
    assert "WARNING" in line
    in_file = (tmp_path / "run" / "log.txt").read_text()
    assert in_file.count("WARNING] train.zero_optimization.stage=2 has no effect") == 1
    assert in_file.splitlines()[0].endswith("train.zero_optimization.enabled is False.")


def test_the_trainer_repeats_nothing_that_default_setup_has_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = config(tmp_path, train_micro_batch_size=4, train_iter=1)
    default_setup(cfg)
    with monkeypatch.context() as patch:
        patch.setattr(setup, "checked", None)
        patch.setattr(setup, "join_ranks", None)
        assert DefaultTrainer(cfg).max_iter == 1
    # A configuration that was changed since is completed and checked again.
    cfg.train.update({"train_iter": 2, "global_batch_size": 8, "num_accumulation_steps": None})
    trainer = DefaultTrainer(cfg)
    assert (trainer.max_iter, trainer.cfg.train.num_accumulation_steps) == (2, 2)
    cfg.train.seed = "one"
    with pytest.raises(ConfigError, match=r"train\.seed"):
        DefaultTrainer(cfg)


@pytest.mark.parametrize(
    ("given", "warns"),
    [
        ({"train_epoch": 0}, True),
        ({"train_epoch": 0, "train_iter": 10000}, False),
        ({"train_epoch": 1}, False),
        ({}, False),
    ],
    ids=str,
)
def test_no_epochs_warn_where_the_default_number_of_iterations_counts(
    given: dict[str, int], warns: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    DefaultTrainer(config(tmp_path, train_micro_batch_size=4, **given))
    said = [text for text in caplog.messages if "train_epoch=0" in text]
    assert len(said) == warns
    if warns:
        assert "the default train.train_iter=10000" in said[0]


class Takes(Classifier):
    def __init__(self, function: Any) -> None:
        super().__init__()


def test_what_the_saved_configuration_does_not_restore_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is written by default_setup and, completed, by the trainer."""
    cfg = file_config(tmp_path / "run", LazyCall(Takes)(function=lambda: None), points, train_iter=1)
    cfg.train.train_micro_batch_size = 4
    with caplog.at_level(logging.WARNING, "trainwright"):
        default_setup(cfg, Namespace(config_file=str(tmp_path / "config.py")))
        DefaultTrainer(cfg).train()
    assert caplog.text.count("not restored when a run starts from this file: model.function") == 1


@pytest.mark.parametrize("is_data", [False, True])
def test_numbers_that_a_run_computes_are_a_warning_in_a_python_file_and_not_in_a_saved_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_data: bool
) -> None:
    cfg = config(tmp_path, train_iter=4, warmup_iter=2, train_micro_batch_size=2)
    cfg.train.scheduler.update(max_iter=100, warmup_iter=0)
    if is_data:
        LazyConfig.save(cfg, tmp_path / "config.yaml")
        cfg = LazyConfig.load(tmp_path / "config.yaml")
    with caplog.at_level(logging.WARNING, "trainwright"):
        trainer = DefaultTrainer(cfg)
        trainer.cfg.train.update(train_iter=5)
        DefaultTrainer(trainer.cfg)
    found = [text for text in caplog.messages if "has no effect: the run computes it" in text]
    assert [text.partition(" has")[0] for text in found] == (
        [] if is_data else ["train.warmup_iter=2", "train.scheduler.max_iter=100"]
    )


class OwnTrainer(DefaultTrainer):
    """Of a user; it may read other sections."""


@pytest.mark.parametrize(
    ("more", "trainer", "warned"),
    [
        ({}, DefaultTrainer, True),
        ({}, OwnTrainer, False),
        ({"optim": "${optimizer}"}, DefaultTrainer, False),
        ({"optim": LazyCall(torch.optim.AdamW)(params={}, lr=0.1)}, DefaultTrainer, False),
        ({"own": {"lr": "${optimizer.lr}"}}, DefaultTrainer, False),
        ({"own": [LazyCall(torch.optim.SGD)(lr=0.1)]}, DefaultTrainer, False),
    ],
)
@pytest.mark.parametrize("is_yaml", [False, True])
def test_a_lazy_call_by_the_name_of_another_library_that_nothing_reads_is_a_warning(
    more: dict[str, Any],
    trainer: type[DefaultTrainer],
    warned: bool,
    is_yaml: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    cfg = config(tmp_path, train_iter=1, train_micro_batch_size=4)
    del cfg.optim
    cfg.update({"optimizer": LazyCall(torch.optim.SGD)(params={}, lr=0.1), **more})
    if is_yaml:
        LazyConfig.save(cfg, tmp_path / "config.yaml")
        cfg = LazyConfig.load(tmp_path / "config.yaml")
    trainer(cfg)
    text = "optimizer: a training does not read this lazy call. Write optim = LazyCall(...)(...)."
    assert caplog.messages.count(text) == warned


def test_a_lazy_call_of_the_class_that_is_the_default_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cfg = config(tmp_path, train_iter=1, train_micro_batch_size=4)
    cfg.optimizer = LazyCall(torch.optim.AdamW)(params={}, lr=0.1)
    DefaultTrainer(cfg)
    assert "optimizer: a training does not read this lazy call" in caplog.text


def test_a_number_that_a_run_computes_is_a_warning_once_with_the_name_of_its_schedule(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cfg = config(tmp_path, train_iter=4, train_micro_batch_size=2)
    cfg.train.scheduler.max_iter = 100
    cfg.optim = {"g": LazyCall(torch.optim.SGD)(params={}, lr=0.1)}
    cfg.train.scheduler = {"g": cfg.train.scheduler}
    trainer = DefaultTrainer(cfg)
    trainer.train(0, 1)
    trainer.cfg.train.train_iter = 5
    trainer.train(1)
    assert trainer.max_iter == 5
    found = [text for text in caplog.messages if "has no effect: the run computes it" in text]
    assert [text.partition(" has")[0] for text in found] == ["train.scheduler.g.max_iter=100"]


@pytest.mark.parametrize("name", ["scheduler", "evaluator"])
def test_a_schedule_or_evaluator_beside_the_sections_is_a_warning(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cfg = config(tmp_path, train_iter=1, train_micro_batch_size=4)
    cfg[name] = LazyCall(torch.optim.lr_scheduler.StepLR)(step_size=3)
    if name == "evaluator":
        del cfg.train.evaluation
    DefaultTrainer(cfg)
    assert f"{name}: a training does not read this lazy call" in caplog.text


@pytest.mark.parametrize(
    ("node", "text"),
    [
        ([LazyCall(rows)()], r"got a list of 1; it must be one loader, without the brackets: LazyCall\("),
        ({"dataset": LazyCall(rows)()}, r"got a section with dataset, without _target_; describe a loader: LazyCall"),
        (5, r"got int, which yields no batches; describe a loader"),
    ],
)
@pytest.mark.parametrize("key", ["train", "test"])
def test_what_is_no_loader_is_answered_with_the_line_to_write(node: Any, text: str, key: str, tmp_path: Path) -> None:
    cfg = config(tmp_path, train_iter=1, train_micro_batch_size=4)
    cfg.dataloader[key] = node if key == "train" else [node]
    name = "dataloader.train" if key == "train" else r"dataloader\.test\.0"
    with pytest.raises(ConfigError, match=f"{name}: {text}"):
        DefaultTrainer(cfg)


class Batches:
    """A loader without ``__iter__``."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.ones(4, 4)}


def batches_by_name() -> dict[str, Any]:
    return {"a": Batches()[0]}


class OwnLoader(DefaultTrainer):
    @classmethod
    def build_train_loader(cls, cfg: DictConfig, tokenizer: Any = None) -> Any:
        return Batches()


def test_loaders_need_no_iter_and_a_data_set_may_yield_batches_of_an_evaluation(tmp_path: Path) -> None:
    cfg = config(tmp_path, train_iter=1, train_micro_batch_size=4)
    cfg.dataloader = {"train": LazyCall(Batches)(), "test": {"a": LazyCall(Batches)(), "b": LazyCall(rows)()}}
    cfg.train.evaluation.enabled = False
    for kind in (DefaultTrainer, OwnLoader):
        kind(cfg).train()
    cfg.dataloader.train = LazyCall(rows)()
    with pytest.raises(ConfigError, match=r"dataloader\.train: got Samples, a data set; describe a loader of it"):
        DefaultTrainer(cfg)


def test_a_loader_of_numbers_is_no_data_set_to_change(tmp_path: Path) -> None:
    cfg = config(tmp_path, train_iter=1, train_micro_batch_size=1)
    cfg.dataloader.train = LazyCall(batches_by_name)()
    with pytest.raises(ConfigError, match=r"The loader yields str; .* the model's forward\.$"):
        DefaultTrainer(cfg).train()


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (
            {"batch_size": 64},
            "dataloader.batch_size: a training does not read it. Write train.train_micro_batch_size=64.",
        ),
        (
            {"val": [LazyCall(build_image_test_loader)(dataset=LazyCall(rows)(), num_workers=0)]},
            "Is dataloader.val it?",
        ),
        ({"train": LazyCall(build_image_test_loader)(dataset=LazyCall(rows)(), num_workers=0)}, "without shuffling"),
        ({"batch_size": 4, "own": 3}, None),
        ({"batch_size": 64, "own": "${.batch_size}"}, None),
        ({"seed": 3, "data": "/data"}, None),
        ({"val": 1, "own": "${dataloader.val}"}, None),
    ],
)
def test_keys_of_the_section_dataloader_that_mean_another_are_a_warning(
    more: dict[str, Any], text: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cfg = config(tmp_path, train_iter=1, train_micro_batch_size=4)
    cfg.dataloader.pop("test", None)
    cfg.dataloader.update(more)
    DefaultTrainer(cfg)
    found = [one for one in caplog.messages if "dataloader" in one]
    assert not found if text is None else len(found) == 1 and text in found[0]


def test_code_of_the_users_own_may_read_the_section_dataloader(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cfg = config(tmp_path, train_iter=1, train_micro_batch_size=4)
    cfg.dataloader.val = LazyCall(Batches)()
    cfg.train.evaluation.enabled = False
    DefaultTrainer(cfg)
    cfg.train.evaluation.enabled = True
    OwnLoader(cfg)
    del cfg.dataloader.val
    cfg.dataloader.batch_size = 64
    cfg.train.hooks = [LazyCall(HookBase)()]
    DefaultTrainer(cfg)
    assert "dataloader." not in caplog.text


def test_weights_of_another_width_are_answered_with_the_setting_of_their_run(tmp_path: Path) -> None:
    def width(size: int, **train: Any) -> DictConfig:
        model = LazyCall(Classifier)(sizes=(4, size, 2))
        return file_config(tmp_path, model, points, points, train_iter=1, train_micro_batch_size=4, **train)

    DefaultTrainer(width(3)).train()
    text = r"run of this checkpoint has model\.sizes=\[4, 3, 2\]; this configuration has model\.sizes=\[4, 5, 2\]"
    with pytest.raises(CheckpointError, match=text):
        DefaultTrainer(width(5, resume=True))
    with pytest.raises(CheckpointError, match=text):
        build_evaluation(width(5, resume=True), DefaultTrainer)
    (tmp_path / "model_final/trainer.json").write_text("{")  # damaged
    with pytest.raises(CheckpointError):
        build_evaluation(width(5, resume=True), DefaultTrainer, str(tmp_path / "model_final"))


_SAME_DATA = "dataloader.test: its data set is the same call, with the same arguments, as dataloader.train.dataset"


def of_split(train: bool = True) -> Samples:
    return rows()


@pytest.mark.parametrize(
    ("test", "more", "is_same"),
    [
        (LazyCall(of_split)(train=True), {}, True),
        (LazyCall(of_split)(train=False), {}, False),
        (LazyCall(of_split)(), {}, False),
        (LazyCall(of_split)(train=True), {"overfit_batches": 1}, False),
    ],
)
def test_a_test_loader_of_the_training_data_is_a_warning(test, more, is_same, tmp_path, caplog) -> None:
    train = LazyCall(of_split)(train=True)
    DefaultTrainer(file_config(tmp_path, Squares, train, test, train_iter=1, train_micro_batch_size=4, **more))
    assert (_SAME_DATA in caplog.text) is is_same


def test_loaders_that_choose_samples_or_other_test_data_are_no_warning(tmp_path, caplog) -> None:
    train = LazyCall(of_split)(train=True)
    cfg = file_config(tmp_path, Squares, train, train, train_iter=1, train_micro_batch_size=4)
    cfg.dataloader.test.append(LazyCall(build_image_test_loader)(dataset=LazyCall(of_split)(train=False)))
    DefaultTrainer(cfg)
    cfg = file_config(tmp_path, Squares, train, train, train_iter=1, train_micro_batch_size=4)
    cfg.dataloader.test[0].sampler = LazyCall(SequentialSampler)(data_source=range(2))
    setup.warn_of_same_data(cfg)
    assert _SAME_DATA not in caplog.text
