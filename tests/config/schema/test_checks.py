"""Faults of a configuration, all of them, before the run."""
# ruff: noqa: C408 - configurations are written with dict(...), as users write them

import logging
import re

import pytest
from omegaconf import OmegaConf

from trainwright.config import ConfigError, ConfigKeyError, ConfigTypeError, LazyCall, LazyConfig
from trainwright.config.schema.checks import _log_without_effect, validate
from trainwright.config.schema.sections import complete


def net(width=1, depth=1):
    return width, depth


def loader(dataset=None, num_workers=0):
    return dataset


class Anything:
    def __init__(self, **settings):
        self.settings = settings


def whole(**train):
    """A configuration without faults, whose targets need nothing but this file."""
    node = LazyCall(Anything)()
    train = {"scheduler": node, "evaluation": {"evaluator": node}} | train
    sections = {"model": LazyCall(net)(width=2), "dataloader": {"test": [LazyCall(loader)()]}, "optim": node}
    return complete(OmegaConf.create(sections | {"train": train}, flags={"allow_objects": True}))


def fault(cfg, **kwargs):
    with pytest.raises(ConfigError) as caught:
        validate(cfg, **kwargs)
    return caught.value


def test_the_defaults_and_a_small_run_have_no_faults():
    validate(whole())
    validate(whole(), source="c.py", overrides=["train.seed=1"])


def test_the_packaged_targets_exist_and_take_their_arguments():
    pytest.importorskip("trainwright.optim")
    cfg = complete(
        {"model": {"_target_": "torch.nn.Linear", "in_features": 1, "out_features": 1}, "dataloader": {"test": []}}
    )
    validate(cfg)


def test_keys_that_the_documents_readers_use_are_accepted():
    validate(whole(samples=10, resume=True, iter_per_epoch=3, warmup_iter=0, start_iter=5, consumed_train_samples=7))
    cfg = whole()
    cfg.graph.update(dict(debug=-1, auto_parallel=dict(enabled=False), global_mode=dict(enabled=False)))
    cfg.train.evaluation.eval_iter = 1e5
    cfg.own_section = {"anything": 1}
    cfg.models = {"a plural is another name": 1}
    validate(cfg)


@pytest.mark.parametrize(
    ("key", "value", "error", "says"),
    [
        ("train.log_perid", 1, ConfigKeyError, "Did you mean 'log_period'"),
        ("train.eval_mode", "max", ConfigKeyError, "Did you mean 'train.evaluation.eval_mode'"),
        ("train.dist.tensor_paralel_size", 1, ConfigKeyError, "Did you mean 'tensor_parallel_size'"),
        ("graph.enable", True, ConfigKeyError, "Did you mean 'enabled'"),
        ("train.seed", 0, ConfigError, r"got 0 \(int\); it must be a whole number >= 1"),
        ("train.seed", "abc", ConfigTypeError, r"got 'abc' \(str\)"),
        ("train.seed", 1.5, ConfigTypeError, "float"),
        ("train.seed", True, ConfigTypeError, "bool"),
        ("train.train_iter", -1, ConfigError, ">= 0"),
        ("train.train_epoch", -1, ConfigError, ">= 0"),
        ("train.train_micro_batch_size", 0, ConfigError, ">= 1, or None"),
        ("train.warmup_ratio", 1, ConfigError, r"\[0, 1\)"),
        ("train.warmup_ratio", float("nan"), ConfigError, r"\[0, 1\)"),
        ("train.log_period", 0, ConfigError, ">= 1"),
        ("train.checkpointer.period", 0, ConfigError, ">= 1"),
        ("train.evaluation.eval_period", 0, ConfigError, ">= 1"),
        ("train.evaluation.eval_iter", 0, ConfigError, ">= 1"),
        ("train.evaluation.eval_iter", 2.5, ConfigError, ">= 1"),
        ("train.evaluation.eval_mode", "best", ConfigError, "'max' or 'min'"),
        ("train.evaluation.evaluator", {"topk": 1}, ConfigTypeError, "LazyCall"),
        ("train.scheduler", "cosine", ConfigTypeError, "LazyCall"),
        ("train.zero_optimization.stage", 4, ConfigError, "1, 2 or 3"),
        ("train.zero_optimization.enabled", True, ConfigError, "not supported yet in this version"),
        ("train.dist.tensor_parallel_size", 2, ConfigError, "not supported yet in this version"),
        ("train.dist.pipeline_parallel_size", 4, ConfigError, "not supported yet in this version"),
        ("train.amp", True, ConfigTypeError, r"a section, for example amp=dict\(enabled"),
        ("train.output_dir", "", ConfigError, "not empty"),
        ("train.input_placement_device", "foo", ConfigError, "'cpu', 'cuda'.*got|got 'foo'.*'cpu', 'cuda'"),
        ("train.dist.device_type", "cuda:x", ConfigError, r"got 'cuda:x'.*'cuda:0'"),
        ("train.dist.device_type", 0, ConfigTypeError, r"got 0 \(int\)"),
        ("optim", True, ConfigTypeError, "must be a section, for example optim = LazyCall"),
        ("model", 5, ConfigTypeError, "must be a section"),
        ("model", [1], ConfigTypeError, "must be a section"),
        ("graph", "on", ConfigTypeError, r"for example graph = dict\(enabled"),
        ("optim", LazyCall(Anything), ConfigTypeError, "forget the second call"),
        ("dataloader", {"tets": []}, ConfigKeyError, "missing, and so is dataloader.test. The section has tets"),
        ("train.evaluation", None, ConfigTypeError, "a section"),
        ("graph", True, ConfigTypeError, "a section"),
        ("graph.enabled", "yes", ConfigTypeError, "True or False"),
        ("dataloader.test", LazyCall(loader)(), ConfigTypeError, "list"),
        ("train.output_dir", "${nowhere}", ConfigKeyError, "nowhere"),
        ("train.output_dir", "???", ConfigKeyError, "no value yet"),
        ("model.width", "${nowhere}", ConfigKeyError, "nowhere"),
        ("model.widht", 3, ConfigKeyError, "Did you mean"),
        ("model.depht", 3, ConfigKeyError, "Did you mean 'depth'"),
        ("model._target_", "torch.nn.Linaer", ConfigError, "Did you mean 'Linear'"),
        ("model._target_", "nowhere_at_all.Net", ConfigError, "no module 'nowhere_at_all'"),
        ("model._target_", 5, ConfigTypeError, "callable"),
        ("trian", {"a": 1}, ConfigKeyError, "Did you mean 'train'"),
        ("optm", {"a": 1}, ConfigKeyError, "Did you mean 'optim'"),
    ],
)
def test_a_fault_names_the_key_what_came_and_what_is_allowed(key, value, error, says):
    cfg = whole()
    parent, _, last = key.rpartition(".")
    section = OmegaConf.select(cfg, parent) if parent else cfg
    section[last] = value
    caught = fault(cfg, source="configs/c.py")
    assert isinstance(caught, error)
    assert caught.args[0].startswith(key)
    assert re.search(says, str(caught))


def test_a_missing_section_is_named_with_the_slip_that_may_be_it():
    cfg = whole()
    cfg.modell = cfg.model
    del cfg.model
    assert "modell (in c.py): no such section. Did you mean 'model'?" in str(fault(cfg, source="c.py"))
    del cfg.modell, cfg.dataloader
    text = str(fault(cfg))
    assert "model: this section is missing" in text
    assert "dataloader: this section is missing" in text


def test_all_faults_are_in_one_message_in_the_order_of_the_file():
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


def test_an_override_is_blamed_for_what_it_touched():
    cfg = whole()
    overrides = ["train.seed=0", "train.eval_period=0", "+model={widht:1}"]
    LazyConfig.apply_overrides(cfg, overrides)
    text = str(fault(complete(cfg), source="configs/c.py", overrides=overrides))
    assert "train.seed (set by an override on the command line: 'train.seed=0')" in text
    assert "train.evaluation.eval_period (set by an override on the command line: 'train.eval_period=0')" in text
    assert "model.widht (set by an override on the command line: '+model={widht:1}')" in text


def test_nothing_to_train_is_a_fault():
    assert "train.train_epoch is 0 too" in str(fault(whole(train_iter=0, train_epoch=0)))


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


def test_ready_made_objects_need_no_description():
    cfg = whole()
    cfg.model = Anything()
    cfg.optim = Anything()
    cfg.train.scheduler = Anything()
    validate(cfg)


@pytest.mark.parametrize("name", ["lr", "weight_decay", "eps"])
def test_a_rate_that_is_not_a_number_is_reported_with_its_override(name):
    cfg = complete({"model": LazyCall(dict)(), "dataloader": {"test": []}})
    cfg.optim[name] = "abc"
    with pytest.raises(
        ConfigTypeError, match=rf"optim\.{name} .*'optim\.{name}=abc'.*got 'abc' \(str\); it must be a number"
    ):
        validate(cfg, overrides=[f"optim.{name}=abc"])


@pytest.mark.parametrize("name", ["lr", "weight_decay"])
def test_a_negative_rate_is_a_fault_of_the_override_that_set_it(name):
    cfg = complete(LazyConfig.apply_overrides(whole(), [f"optim.{name}=-1e-3"]))
    for overrides in ([], [f"optim.{name}=-1e-3"]):
        with pytest.raises(
            ConfigError, match=rf"optim.{name} \(set by an override on the command line: .*must be a number >= 0"
        ):
            validate(cfg, overrides=overrides)


def test_an_override_is_named_without_the_list_of_them_also_above_and_in_lists():
    texts = ["train.seed=0", "train.dist={device_type:7}", "dataloader.test.0.num_workerss=2"]
    cfg = complete(LazyConfig.apply_overrides(whole(), texts))
    message = str(fault(cfg))
    for text in texts:
        assert f"set by an override on the command line: {text!r}" in message
