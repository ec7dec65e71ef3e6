"""Faults of a configuration, all of them, before the run."""

import logging
import re
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from tests.config.config_file.conftest import Anything, fault, loader, whole
from tests.toys import Classifier, file_config, points
from trainwright import DefaultTrainer, get_config
from trainwright.base.errors import ConfigKeyError, ConfigTypeError
from trainwright.config import ConfigError, LazyCall, LazyConfig
from trainwright.config.config_file.checks import _log_without_effect, validate
from trainwright.config.config_file.sections import complete
from trainwright.config.lazy.provenance import override_at
from trainwright.config.lazy.targets import argument_fault
from trainwright.data import build_image_train_loader


def test_the_defaults_a_small_run_and_ready_made_objects_have_no_faults():
    validate(whole(), source="c.py")
    linear = {"_target_": "torch.nn.Linear", "in_features": 1, "out_features": 1}
    validate(complete({"model": linear, "dataloader": {"test": []}}))
    cfg = whole()
    cfg.model = cfg.optim = cfg.train.scheduler = Anything()
    validate(cfg)


@pytest.mark.parametrize("section", ["train", "optim", "graph"])
def test_a_file_of_settings_in_place_of_its_section_is_answered_with_the_line_to_write(section):
    cfg = whole()
    cfg[section] = get_config(f"common/{section}.py")
    cfg[section].lr = 0.01  # a setting of the section, at the place where users expect it
    with pytest.raises(ConfigKeyError, match=rf'write get_config\("common/{section}\.py"\)\.{section}\.'):
        validate(complete(cfg))


def test_a_missing_section_is_named_with_the_slip_that_may_be_it():
    cfg = whole()
    cfg.modell = cfg.model
    del cfg.model
    assert "modell (in c.py): no such section. Did you mean 'model'?" in str(fault(cfg, source="c.py"))
    del cfg.modell, cfg.dataloader
    text = str(fault(cfg))
    assert "model: this section is missing" in text
    assert "dataloader: this section is missing" in text
    assert text.count("A script of the Python API") == 1
    assert "estimate" in text


def test_all_faults_are_in_one_message():
    cfg = whole(seed=-1, log_perid=3)
    cfg.model.widht = 1
    caught = fault(cfg, source="configs/c.py")
    lines = str(caught).splitlines()
    assert lines[0].startswith("3 faults")
    assert [line.split()[0] for line in lines[1:]] == ["train.seed", "train.log_perid", "model.widht"]
    assert type(caught) is ConfigError
    assert isinstance(caught, ValueError)


def test_faults_deep_in_the_dataloader_carry_their_index_and_line():
    cfg = whole()
    cfg.dataloader.test = [LazyCall(loader)(dataset=[LazyCall(loader)(num_worker=1)])]
    text = str(fault(cfg))
    assert text.startswith("dataloader.test.0.dataset.0.num_worker (in ")
    assert "test_checks.py:" in text


def test_what_is_written_in_the_wrong_place_is_told_the_right_one():
    assert "own = dict(rdzv=...)" in str(fault(whole(rdzv=3)))
    assert "Did you mean 'cuda'?" in str(fault(whole(input_placement_device="gpu")))
    text = str(fault(complete({"cfg": {**whole()}})))
    assert "write model = ... instead of cfg.model" in text
    assert "write dataloader = ... instead of cfg.dataloader" in text
    assert "train.train_epoch is 0 too" in str(fault(whole(train_iter=0, train_epoch=0)))


def test_an_override_is_blamed_for_what_it_touched():
    cfg = whole()
    overrides = ["train.seed=-1", "train.eval_period=0", "+model={widht:1}", "train.dist={device_type:7}"]
    overrides += ["dataloader.test.0.num_workerss=2", "train.model_checkpoint.every_n_epoch=3"]  # makes a section
    LazyConfig.apply_overrides(cfg, overrides)
    text = str(fault(complete(cfg), source="configs/c.py"))
    assert "train.seed (set by an override on the command line: 'train.seed=-1')" in text
    assert "train.evaluation.eval_period (set by an override on the command line: 'train.eval_period=0')" in text
    for override in overrides:
        assert f"set by an override on the command line: {override!r}" in text


@pytest.mark.parametrize("milestones", [[0.5, 0.2], [0.2, 1.0], [-0.1], ["a"], 0.5])
def test_milestones_are_increasing_ratios(milestones):
    cfg = whole()
    cfg.train.scheduler.milestones = milestones
    assert "train.scheduler.milestones" in str(fault(cfg))
    cfg.train.scheduler.milestones = [0.3, 0.6]
    validate(cfg)
    cfg.train.scheduler.milestones = [300, 600]  # as the config.yaml of a run has them
    validate(cfg)


def test_a_target_whose_module_fails_to_import_is_a_fault(tmp_path, monkeypatch):
    (tmp_path / "broken_module_xyz.py").write_text("raise RuntimeError('half written')\n")
    (tmp_path / "needs_module_xyz.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    cfg = whole()
    cfg.model = LazyCall("broken_module_xyz.Net")()
    assert "RuntimeError: half written" in str(fault(cfg))
    cfg.model = LazyCall("needs_module_xyz.Net")()
    assert "a_package_that_is_not_there" in str(fault(cfg))


def test_a_fault_in_a_packaged_node_names_the_file_that_has_changed_it():
    cfg = whole()
    cfg.optim = get_config("common/optim.py").optim
    cfg.optim.lrr = 0.01
    assert "optim.lrr (in c.py): " in str(fault(cfg, source="c.py"))


def test_settings_without_effect_are_logged_once(caplog):
    _log_without_effect.cache_clear()
    cfg = whole(nccl_fusion_max_ops=7)
    cfg.graph.debug = 1
    with caplog.at_level(logging.INFO, logger="trainwright.config"):
        validate(cfg)
        validate(cfg)
    assert sorted(record.args[0] for record in caplog.records) == ["graph.debug", "train.nccl_fusion_max_ops"]


@pytest.mark.parametrize("device", [None, "cpu", "cuda", "cuda:1", "mps", "xpu:0"])
def test_devices_are_named_by_type_and_number(device):
    validate(whole(input_placement_device=device, dist={"device_type": device}))


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("optim.lr=abc", r"got 'abc' \(str\); it must be a number"),
        ("optim.weight_decay=abc", r"got 'abc' \(str\); it must be a number"),
        ("optim.eps=abc", r"got 'abc' \(str\); it must be a number"),
        ("optim.lr=-1e-3", "must be a number >= 0"),
        ("optim.weight_decay=-1e-3", "must be a number >= 0"),
        ("optim.betas=[0.9]", r"got \[0.9\] \(list\); it must be 2 numbers, such as \(0.9, 0.999\)"),
        ("optim.betas=0.9", r"got 0.9 \(float\); it must be 2 numbers"),
        ("optim.betas=[0.9,x]", r"got \[0.9, 'x'\] \(list\); it must be 2 numbers"),
        ("optim.params.model=1", r"got 1 \(int\); it is the model of the run.*leave the key out"),
    ],
)
def test_an_impossible_rate_is_a_fault_of_the_override_that_set_it(override, says):
    cfg = complete({"model": LazyCall(dict)(), "dataloader": {"test": []}})
    LazyConfig.apply_overrides(cfg, [override])
    with pytest.raises(ConfigError, match=rf"^{override.split('=')[0]} .*'{re.escape(override)}'.*{says}"):
        validate(cfg)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("lr", "1e-3", r"optim.lr: got '1e-3' \(str\); it must be a number. Write 1e-3, without quotes"),
        ("type", "SGD", r"takes no argument 'type'. Another class is a lazy call: LazyCall\(Class\)"),
    ],
)
def test_an_error_of_the_optimizer_says_what_to_write(key, value, says):
    cfg = complete({"model": LazyCall(dict)(), "dataloader": {"test": []}})
    cfg.optim[key] = value
    with pytest.raises(ConfigError, match=says):
        validate(cfg)


@pytest.mark.parametrize(
    ("section", "key", "line"),
    [
        ("", "train.evaluation.eval_period", "cfg.train.evaluation.eval_period = ..."),
        ("", "optim.lr", "cfg.optim.lr = ..."),
        ("train", "evaluation.eval_period", "cfg.train.evaluation.eval_period = ..."),
        ("train.evaluation", "a.b", "cfg.train.evaluation.a.b = ..."),
    ],
)
def test_a_key_with_dots_is_refused_with_the_line_to_write(tmp_path: Path, section: str, key: str, line: str) -> None:
    cfg = file_config(tmp_path, Classifier, points, train_iter=1)
    (OmegaConf.select(cfg, section) if section else cfg).update({key: 5})
    with pytest.raises(ConfigKeyError, match="one key with dots in its name") as raised:
        DefaultTrainer(cfg)
    assert line in str(raised.value)


@pytest.mark.parametrize(
    ("argument", "hint"),
    [
        ("batch_size", r"train_batch_size.*train\.train_micro_batch_size"),
        ("train_batch_sise", "Did you mean 'train_batch_size'"),
        ("shuffle", r"sampler=LazyCall\(CyclicSampler\)\(shuffle=\.\.\.\)"),
        ("drop_last", r"sampler=LazyCall\(SingleRoundSampler\)\(drop_last=\.\.\.\)"),
    ],
)
def test_an_argument_that_a_loader_lacks_is_answered_with_its_place(tmp_path: Path, argument: str, hint: str) -> None:
    cfg = file_config(tmp_path, Classifier, points, train_iter=1)
    cfg.dataloader.train[argument] = 4
    with pytest.raises(ConfigTypeError, match=f"{argument!r} is not one of its arguments.*{hint}"):
        DefaultTrainer(cfg)


def test_a_lazy_call_without_its_second_call_is_named_at_any_depth():
    cfg = whole()
    cfg.model = LazyCall(Anything)(parts=[LazyCall(dict)(), LazyCall(Classifier)])
    cfg.train.scheduler = LazyCall(Anything)
    text = str(fault(cfg))
    assert re.search(
        r"model\.parts\.1.*Classifier\) was not called\. .* Write LazyCall\(.*Classifier\)\(\.\.\.\)", text
    )
    assert re.search(r"train\.scheduler.*Anything\) was not called", text)


@pytest.mark.parametrize("key", ["scheduler", "evaluation.evaluator"])
def test_a_class_in_place_of_a_part_is_answered_with_its_lazy_call(key):
    cfg = whole()
    OmegaConf.update(cfg.train, key, Anything, merge=False)
    assert re.search(rf"train\.{key}.*.*LazyCall\(.*Anything\)\(", str(fault(cfg)))


def test_a_key_of_a_packaged_lazy_call_is_in_the_file_that_set_it():
    cfg = whole()
    cfg.train.scheduler = get_config("common/train.py").train.scheduler
    cfg.train.scheduler.warmup_iters = 5
    assert "train.scheduler.warmup_iters (in c.py): " in str(fault(cfg, source="c.py"))


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("train.output_dir", ("runs",), r"Write 'runs', without a comma at the end of the line"),
        ("train.output_dir", Path("runs", "a"), r"Write 'runs/a', or str\(\.\.\.\) of it"),
        ("train.seed", (42,), r"Write 42, without a comma"),
        ("optim.lr", (0.1,), r"it must be a number\. Write 0\.1, without a comma"),
        ("train.log_period", "${train.train_itr}", r"not found. Did you mean '\$\{train\.train_iter\}'\?"),
        ("train.log_period", "${trian.train_iter}", r"not found. Did you mean '\$\{train\.train_iter\}'\?"),
        ("train.log_period", "${own.x}", r"not found. The configuration has model, dataloader"),
        ("train.model", {}, r"model is a section of its own: write model in place of train\.model"),
        ("optim._target_", "AdamW", r"no module 'AdamW'\. Did you mean 'torch\.optim\.AdamW'\?"),
    ],
)
def test_a_value_of_another_form_is_answered_with_what_to_write(key, value, text):
    cfg = whole()
    section, _, name = key.partition(".")
    cfg[section][name] = value
    assert re.search(text, str(fault(cfg)))


def test_what_stays_of_the_packaged_optimizer_is_named_with_the_line_to_write():
    cfg = whole()
    cfg.optim = get_config("common/optim.py").optim
    cfg.optim._target_ = torch.optim.SGD
    text = str(fault(cfg))
    assert "optim = LazyCall(SGD)(...), or del optim.betas." in text
    assert "or del optim.eps." in text


def test_the_length_of_a_schedule_that_lacks_it_is_answered_with_a_reference():
    text = argument_fault(torch.optim.lr_scheduler.CosineAnnealingLR, {"optimizer": None})
    assert "write T_max='${train.train_iter}' in its call. '${train.train_iter}' is the length of the run" in str(text)


@pytest.mark.parametrize("given", [{}, {"epochs": 3}, {"steps_per_epoch": 10, "epochs": None}])
def test_a_cycle_without_its_length_is_refused_before_it_is_built(given):
    text = argument_fault(torch.optim.lr_scheduler.OneCycleLR, {"optimizer": None, "max_lr": 0.1, **given})
    assert text is not None
    assert "total_steps='${train.train_iter}'" in text


@pytest.mark.parametrize("given", [{"total_steps": 30}, {"epochs": 3, "steps_per_epoch": 10}])
def test_a_cycle_with_a_length_is_not_refused(given):
    assert argument_fault(torch.optim.lr_scheduler.OneCycleLR, {"optimizer": None, "max_lr": 0.1, **given}) is None


def test_a_name_of_another_library_within_a_section_is_answered_with_the_key_of_this_section():
    cfg = whole()
    cfg.train.checkpointer.save_total_limit = 2
    assert "no such key. Did you mean 'train.checkpointer.max_to_keep'?" in str(fault(cfg))


def test_a_setting_of_the_groups_beside_those_of_the_optimizer_is_answered_with_its_key():
    cfg = whole()
    cfg.optim = get_config("common/optim.py").optim
    cfg.optim.clip_grad_max_norm = 0.5
    assert "Here it is optim.params.clip_grad_max_norm." in str(fault(cfg))


def test_a_training_loader_among_those_of_evaluations_is_refused():
    cfg = whole()
    cfg.dataloader.test = [LazyCall(build_image_train_loader)(dataset=[], train_batch_size=2)]
    text = str(fault(cfg))
    assert "dataloader.test.0._target_" in text
    assert "Write build_image_test_loader." in text


def test_the_length_of_a_cycle_is_not_asked_of_others():
    def logger_of_mine(folder, total_steps=None, epochs=None, steps_per_epoch=None): ...

    assert argument_fault(logger_of_mine, {"folder": "x"}) is None


def test_an_override_of_a_section_that_the_file_leaves_out_sets_this_key_alone():
    cfg = LazyConfig.apply_overrides(OmegaConf.create({"model": {}, "dataloader": {}}), ["train.train_iter=20"])
    whole_of = complete(cfg)
    assert whole_of.train.train_iter == 20
    assert override_at(whole_of, "train.train_iter") == "train.train_iter=20"
    assert override_at(whole_of, "train.seed") is None
    assert override_at(whole_of, "train.warmup_iter") is None
