"""Completing a configuration from the defaults."""
# ruff: noqa: C408 - configurations are written with dict(...), as users write them

import copy
import math
from fractions import Fraction

import pytest
from omegaconf import OmegaConf

from trainwright.config import ConfigError, ConfigTypeError, LazyCall, LazyConfig, get_config, instantiate
from trainwright.config.config_file.sections import (
    complete,
    milestone_iterations,
    resolve_batch_sizes,
    total_iterations,
    warmup_iterations,
)


class Evaluator:
    def __init__(self, level=1):
        self.level = level


def run(**sections):
    return OmegaConf.create(sections, flags={"allow_objects": True})


def test_a_whole_number_may_be_written_as_a_float():
    train = {"train_iter": 1e2, "log_period": 1e1, "evaluation": {"eval_period": 0.5}, "checkpointer": {"period": 1.0}}
    found = complete({"train": train}).train
    values = [found.train_iter, found.log_period, found.evaluation.eval_period, found.checkpointer.period]
    assert [repr(value) for value in values] == ["100", "10", "0.5", "1.0"]


def test_missing_sections_are_the_defaults():
    whole = complete(run(model=LazyCall(Evaluator)()))
    assert whole.train == get_config("common/train.py").train
    assert whole.optim == get_config("common/optim.py").optim
    assert whole.graph == {"enabled": False, "backend": "inductor"}
    assert complete(run(optim=None, train=None)).train.seed == 1234


def test_epochs_that_are_set_go_before_the_default_number_of_iterations():
    def iterations(cfg):
        return complete(cfg).train.train_iter

    packaged = get_config("common/train.py").train
    packaged.update(dict(train_epoch=3))
    assert iterations(run(train=packaged)) == 0
    assert iterations({"train": copy.deepcopy(packaged)}) == 0
    assert iterations({"train": {"train_epoch": 3}}) == 0
    assert iterations(LazyConfig.apply_overrides(get_config("common/defaults.py"), ["train.train_epoch=3"])) == 0
    assert iterations({"train": {"train_epoch": 0}}) == 10000
    assert iterations({}) == 10000


def test_iterations_that_are_set_stand_beside_epochs_even_if_they_are_the_default(tmp_path):
    packaged = get_config("common/train.py").train
    packaged.train_epoch = 3
    packaged.train_iter = 10000
    assert complete({"train": packaged}).train.train_iter == 10000
    both = ["train.train_epoch=3", "train.train_iter=10000"]
    assert complete(LazyConfig.apply_overrides(get_config("common/defaults.py"), both)).train.train_iter == 10000
    (tmp_path / "config.yaml").write_text("train: {train_epoch: 3, train_iter: 10000}")
    assert complete(LazyConfig.load(tmp_path / "config.yaml")).train.train_iter == 10000
    saved = get_config("common/defaults.py")
    saved.train.train_epoch = 3
    LazyConfig.save(complete(saved), tmp_path / "config.yaml")  # a default there is not set
    assert complete(LazyConfig.load(tmp_path / "config.yaml")).train.train_iter == 0


def test_a_partial_section_is_filled_leaf_by_leaf_and_keeps_what_it_has():
    train = get_config("common/train.py").train
    train.update(dict(train_iter=7, evaluation=dict(enabled=False), dist=dict(data_parallel_size=2)))
    assert "eval_iter" not in train.evaluation
    whole = complete(run(train=train))
    assert (whole.train.train_iter, whole.train.evaluation.enabled) == (7, False)
    assert whole.train.evaluation.eval_iter == 1e9
    assert whole.train.evaluation.evaluator.topk == [1, 5]
    assert whole.train.dist.tensor_parallel_size == 1
    assert whole.train.dist.data_parallel_size == 2


def test_a_plain_dict_is_completed_too():
    whole = complete({"train": {"seed": 3, "amp": {"enabled": True}}})
    assert (whole.train.seed, whole.train.amp.enabled, whole.train.log_period) == (3, True, 20)
    with pytest.raises(ConfigTypeError, match="list"):
        complete([1])


def test_nodes_with_a_target_of_their_own_get_no_arguments_of_the_default():
    own = LazyCall(Evaluator)(level=2)
    whole = complete(run(train={"evaluation": {"evaluator": own}, "scheduler": own}, optim=LazyCall(Evaluator)()))
    assert set(whole.train.evaluation.evaluator) == {"_target_", "level"}
    assert set(whole.train.scheduler) == {"_target_", "level"}
    assert set(whole.optim) == {"_target_"}
    assert complete(run(optim={"lr": 0.5})).optim._target_ == "torch.optim.AdamW"


def test_the_input_is_not_changed_and_its_objects_are_passed_on():
    stream = (n for n in range(3))  # cannot be copied
    cfg = run(model=LazyCall(Evaluator)(level=stream), train={"eval_period": 3}, own=[stream])
    OmegaConf.set_readonly(cfg, True)
    OmegaConf.set_struct(cfg, True)
    before = OmegaConf.to_yaml(run(train=cfg.train))
    whole = complete(cfg)
    assert instantiate(whole.model).level is stream
    assert whole.own[0] is stream
    assert OmegaConf.to_yaml(run(train=cfg.train)) == before
    whole.model.level = 1
    assert cfg.model.level is stream


def test_completing_twice_changes_nothing():
    once = complete(run(train={"topk": [1], "seed": 5}))
    assert complete(once) == once
    assert complete(copy.deepcopy(once)) == once


def test_interpolations_stay_and_what_they_point_at_is_not_filled():
    cfg = run(base={"enabled": False}, lr=0.5, train={"evaluation": "${base}"}, optim={"lr": "${lr}"})
    whole = complete(cfg)
    assert whole.train.evaluation.eval_period == 5000
    assert whole.base == {"enabled": False}
    whole.lr = 0.25
    assert whole.optim.lr == 0.25


# Batch sizes and numbers of iterations.


def sizes(micro=None, whole=None, accumulation=None, ranks=1):
    train = {"train_micro_batch_size": micro, "global_batch_size": whole, "num_accumulation_steps": accumulation}
    return resolve_batch_sizes(train, ranks)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"micro": 4}, (4, 4, 1)),
        ({"micro": 4, "ranks": 2}, (4, 8, 1)),
        ({"micro": 4, "accumulation": 3, "ranks": 2}, (4, 24, 3)),
        ({"whole": 24, "ranks": 2}, (12, 24, 1)),
        ({"whole": 24, "accumulation": 3, "ranks": 2}, (4, 24, 3)),
        ({"micro": 4, "whole": 24, "ranks": 2}, (4, 24, 3)),
        ({"micro": 4, "whole": 24, "accumulation": 3, "ranks": 2}, (4, 24, 3)),
    ],
)
def test_missing_batch_sizes_are_computed_from_the_others(given, expected):
    micro, whole, accumulation = sizes(**given)
    assert (micro, whole, accumulation) == expected
    assert micro * accumulation * given.get("ranks", 1) == whole


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "give train_micro_batch_size or global_batch_size"),
        ({"accumulation": 2}, "give train_micro_batch_size or global_batch_size"),
        ({"micro": 4, "whole": 25, "ranks": 2}, r"25 must be divisible by train_micro_batch_size .* is 8 .* 24 and 32"),
        ({"whole": 25, "accumulation": 2}, "25 must be divisible by num_accumulation_steps"),
        ({"micro": 4, "whole": 24, "accumulation": 2}, "24 must be equal to .* is 8"),
    ],
)
def test_sizes_that_do_not_fit_name_all_of_them(given, says):
    with pytest.raises(ConfigError, match=says) as caught:
        sizes(**given)
    for name in ("train_micro_batch_size=", "global_batch_size=", "num_accumulation_steps="):
        assert name in str(caught.value)


@pytest.mark.parametrize(
    ("train", "length", "batch", "total"),
    [
        ({"train_iter": 10}, None, 4, 10),
        ({"train_iter": 10, "train_epoch": 0}, 100, 4, 10),
        ({"train_iter": 0, "train_epoch": 40}, 1437, 32, 1797),  # 1796.25, not 40 * 45
        ({"train_iter": 5000, "train_epoch": 40}, 1437, 32, 5000),
        ({"train_iter": 0, "train_epoch": 500, "iter_per_epoch": 10}, None, 4, 5000),
        ({"train_iter": 10000, "train_epoch": 500, "iter_per_epoch": 10}, 7, 4, 10000),
        ({"train_iter": 0, "train_epoch": 0.1}, 30, 1, 3),  # in floats 0.1 * 30 is a little more than 3
        ({"train_epoch": 1}, 1, 4, 1),
    ],
)
def test_a_run_is_the_longer_of_its_iterations_and_its_epochs(train, length, batch, total):
    assert total_iterations(train, length, batch) == total


def test_a_run_of_nothing_or_of_unknown_length_is_refused():
    with pytest.raises(ConfigError, match="train_epoch=0"):
        total_iterations({"train_iter": 0, "train_epoch": 0}, 10, 1)
    with pytest.raises(ConfigError, match="empty"):
        total_iterations({"train_iter": 0, "train_epoch": 2}, 0, 1)
    with pytest.raises(ConfigError, match="iter_per_epoch"):
        total_iterations({"train_iter": 5, "train_epoch": 2}, None, 1)


def test_warmup_and_milestones_are_rounded_from_the_numbers_that_were_written():
    assert warmup_iterations(100, 0.07) == 7  # in floats 7.000000000000001
    for percent in range(100):
        assert warmup_iterations(1000, percent / 100) == math.ceil(Fraction(percent, 100) * 1000)
    assert milestone_iterations([0, 0.29, 0.57], 100) == [0, 29, 57]  # in floats 28.999 and 56.999
    assert milestone_iterations([30, 60], 100) == [30, 60]
