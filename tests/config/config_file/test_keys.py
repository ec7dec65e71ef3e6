"""The keys of train and graph, and the values that each may have."""
# ruff: noqa: C408 - configurations are written with dict(...), as users write them

import re

import pytest
from omegaconf import OmegaConf

from tests.config.config_file.conftest import Anything, fault, loader, whole
from trainwright.config import ConfigError, ConfigKeyError, ConfigTypeError, LazyCall
from trainwright.config.config_file.checks import validate


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
        ("train.seed", -1, ConfigError, r"got -1 \(int\); it must be a whole number in \[0, 2\*\*63\)"),
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
        ("train.dist.tensor_parallel_size", 0, ConfigError, ">= 1"),
        ("train.dist.pipeline_schedule", "1f1b", ConfigError, "'GPipe', '1F1B'"),
        ("train.amp", True, ConfigTypeError, r"a section, for example amp=dict\(enabled.*Write train.amp.enabled=True"),
        ("train.amp", "yes", ConfigTypeError, r"a section.*Write train.amp.enabled=True"),
        ("train.evaluation", "off", ConfigTypeError, r"a section.*Write train.evaluation.enabled=False"),
        ("train.output_dir", "", ConfigError, "not empty"),
        ("train.output_dir", "a\0b", ConfigError, "without the character NUL"),
        ("train.output_dir", "a" * 256, ConfigError, "at most 255 bytes"),
        ("train.input_placement_device", "foo", ConfigError, "'cpu', 'cuda'.*got|got 'foo'.*'cpu', 'cuda'"),
        ("train.dist.device_type", "cuda:x", ConfigError, r"got 'cuda:x'.*'cuda:0'"),
        ("train.dist.device_type", 0, ConfigTypeError, r"got 0 \(int\)"),
        ("optim", True, ConfigTypeError, "must be a section, for example optim = LazyCall"),
        ("model", 5, ConfigTypeError, "must be a section"),
        ("model", [1], ConfigTypeError, "must be a section"),
        ("graph", "on", ConfigTypeError, r"for example graph = dict\(enabled.*graph.enabled=true"),
        ("optim", LazyCall(Anything), ConfigTypeError, "forget the second call"),
        ("dataloader", {"tets": []}, ConfigKeyError, "missing, and so is dataloader.test. The section has tets"),
        ("train.evaluation", None, ConfigTypeError, "a section"),
        ("graph", True, ConfigTypeError, "a section"),
        ("graph.enabled", "yes", ConfigTypeError, "True or False. Write True"),
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
