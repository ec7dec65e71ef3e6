"""Completing a configuration from the defaults."""
# ruff: noqa: C408 - configurations are written with dict(...), as users write them

import copy

import pytest
from omegaconf import OmegaConf

from trainwright.config import ConfigError, ConfigTypeError, LazyCall, LazyConfig, get_config, instantiate
from trainwright.config.schema.sections import complete


class Evaluator:
    def __init__(self, level=1):
        self.level = level


def run(**sections):
    return OmegaConf.create(sections, flags={"allow_objects": True})


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


def test_a_saved_configuration_trains_as_long_as_the_one_it_is_of(tmp_path):
    cfg = get_config("common/defaults.py")
    cfg.train.train_epoch = 3
    LazyConfig.save(complete(cfg), tmp_path / "config.yaml")
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


def test_aliases_move_to_their_canonical_places():
    train = get_config("common/train.py").train
    train.update(dict(eval_period=100, topk=(1,), recompute_grad=dict(enabled=True), evaluation=dict(enabled=True)))
    whole = complete(run(train=train)).train
    assert whole.evaluation.eval_period == 100
    assert whole.evaluation.evaluator.topk == [1]
    assert whole.evaluation.evaluator._target_ == "trainwright.evaluation.ClsEvaluator"
    assert whole.activation_checkpoint.enabled is True
    assert not {"eval_period", "topk", "recompute_grad"} & set(whole)


def test_an_alias_beats_the_default_that_came_along():
    train = get_config("common/train.py").train
    train.eval_period = 100
    assert complete(run(train=train)).train.evaluation.eval_period == 100


def test_two_values_for_one_setting_are_an_error_that_names_both():
    with pytest.raises(ConfigError, match=r"train\.eval_period is 100 and train\.evaluation\.eval_period is 50"):
        complete(run(train={"eval_period": 100, "evaluation": {"eval_period": 50}}))
    assert (
        complete(run(train={"eval_period": 50, "evaluation": {"eval_period": 50}})).train.evaluation.eval_period == 50
    )


def test_the_input_is_not_changed_and_its_objects_are_passed_on():
    stream = (n for n in range(3))  # cannot be copied
    cfg = run(model=LazyCall(Evaluator)(level=stream), train={"eval_period": 3}, own=[stream])
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


def test_a_read_only_or_closed_config_can_be_completed():
    cfg = run(train={"seed": 2})
    OmegaConf.set_readonly(cfg, True)
    OmegaConf.set_struct(cfg, True)
    whole = complete(cfg)
    whole.train.extra = 1
    assert whole.train.log_period == 20


def test_sections_of_the_users_own_are_kept():
    assert complete(run(mine={"a": 1}, project_root="..")).mine.a == 1
