"""Aliases of train settings: two names of one setting, in files and in overrides."""
# ruff: noqa: C408 - configurations are written with dict(...), as users write them

import pytest
from omegaconf import OmegaConf

from trainwright.config import ConfigError, ConfigKeyError, LazyCall, LazyConfig, get_config
from trainwright.config.config_file.checks import validate
from trainwright.config.config_file.sections import complete


def run(**sections):
    return OmegaConf.create(sections, flags={"allow_objects": True})


def test_aliases_move_to_their_canonical_places():
    train = get_config("common/train.py").train
    train.update(dict(eval_period=100, topk=(1,), recompute_grad=dict(enabled=True), evaluation=dict(enabled=True)))
    whole = complete(run(train=train)).train
    assert whole.evaluation.eval_period == 100
    assert whole.evaluation.evaluator.topk == [1]
    assert whole.evaluation.evaluator._target_ == "trainwright.evaluation.ClsEvaluator"
    assert whole.activation_checkpoint.enabled is True
    assert not {"eval_period", "topk", "recompute_grad"} & set(whole)


def test_two_values_for_one_setting_are_an_error_that_names_both():
    with pytest.raises(ConfigError, match=r"train\.eval_period.* 100 .*train\.evaluation\.eval_period.* 50"):
        complete(run(train={"eval_period": 100, "evaluation": {"eval_period": 50}}))
    assert (
        complete(run(train={"eval_period": 50, "evaluation": {"eval_period": 50}})).train.evaluation.eval_period == 50
    )


ALIASES = {
    "eval_period": ("evaluation.eval_period", 100, 2),
    "topk": ("evaluation.evaluator.topk", [1], [3]),
    "recompute_grad": ("activation_checkpoint", {"enabled": True, "own": 1}, {"enabled": False}),
}


@pytest.mark.parametrize("alias", ALIASES)
@pytest.mark.parametrize("file_has_alias", [True, False])
@pytest.mark.parametrize("override_has_alias", [True, False])
def test_an_override_wins_whichever_of_two_names_it_uses(alias, file_has_alias, override_has_alias):
    canonical, in_file, wanted = ALIASES[alias]
    cfg = OmegaConf.create({"train": {}}, flags={"allow_objects": True})
    if alias == "topk":
        cfg.train.evaluation = {"evaluator": LazyCall("trainwright.evaluation.ClsEvaluator")(topk=(1, 5))}
        if file_has_alias:
            del cfg.train.evaluation.evaluator.topk
    OmegaConf.update(cfg.train, alias if file_has_alias else canonical, in_file, force_add=True)
    text = str(wanted).replace("'", "").replace(" ", "")
    LazyConfig.apply_overrides(cfg, [f"train.{alias if override_has_alias else canonical}={text}"])
    found = OmegaConf.select(complete(cfg).train, canonical)
    if alias == "recompute_grad":
        assert found == {"enabled": False, "own": 1}  # merged, as a dict is
    else:
        assert found == wanted


@pytest.mark.exhaustive(every=4)
@pytest.mark.parametrize(
    ("overrides", "period"),
    [
        (["train={eval_period:2}"], 2),
        (["train.evaluation={eval_period:2}"], 2),
        (["train.eval_period=2", "train.evaluation.eval_period=3"], 3),
        (["train.evaluation.eval_period=3", "train.eval_period=2"], 2),
        (["train.evaluation={enabled:false}"], 100),
        (["train.seed=3"], 100),
        (["~train.eval_period"], 5000),
        (["~train.evaluation.eval_period"], 5000),
    ],
)
@pytest.mark.parametrize("spelling", ["eval_period", "evaluation.eval_period"])
def test_sections_orders_and_deletions_reach_the_other_name_too(overrides, period, spelling):
    cfg = OmegaConf.create({"train": get_config("common/train.py").train}, flags={"allow_objects": True})
    OmegaConf.update(cfg.train, spelling, 100, force_add=True)
    assert complete(LazyConfig.apply_overrides(cfg, overrides)).train.evaluation.eval_period == period


def test_an_alias_is_named_where_the_target_does_not_take_its_value():
    cfg = run(model=LazyCall("torch.nn.Linear")(in_features=1, out_features=1), dataloader={})
    cfg.train = {"topk": [1], "evaluation": {"evaluator": LazyCall("trainwright.evaluation.RegEvaluator")()}}
    with pytest.raises(ConfigKeyError, match=r"takes no argument 'topk'. train.topk is its other name."):
        validate(complete(cfg))


def test_overrides_move_no_keys_of_the_configuration_of_another_program():
    def others():  # as configurations of detectron2's projects have them
        return OmegaConf.create({"train": {"eval_period": 5000, "topk": [1, 5], "max_iter": 9}, "model": {"width": 1}})

    for overrides in ([], ["model.width=2"], ["train.max_iter=9"], ["train={max_iter:9}"]):
        cfg = LazyConfig.apply_overrides(others(), overrides)
        assert cfg.train == others().train
    assert LazyConfig.apply_overrides(others(), ["train.eval_period=7"]).train == {**others().train, "eval_period": 7}
    assert LazyConfig.apply_overrides(others(), ["train.topk=[1]", "~train.eval_period"]).train == {
        "topk": [1],
        "max_iter": 9,
    }
