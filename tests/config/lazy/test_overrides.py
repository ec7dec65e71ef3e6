"""Changes from the command line."""

import sys

import pytest
from omegaconf import OmegaConf

from trainwright.config import ConfigError, ConfigKeyError, ConfigTypeError, LazyCall, LazyConfig, get_config
from trainwright.config.schema.sections import complete


@pytest.fixture
def cfg():
    return OmegaConf.create(
        {
            "train": {"seed": 1, "lr": 0.1, "log": {"a": 1, "b": 2}, "none": None},
            "loaders": [{"workers": 4}, {"workers": 5}],
            "model": LazyCall(dict)(width=1),
        },
        flags={"allow_objects": True},
    )


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("train.seed=2", "train.seed", 2),
        ("train.lr=1e-3", "train.lr", 1e-3),
        ("train.lr=-2.5", "train.lr", -2.5),
        ("train.seed=null", "train.seed", None),
        ("train.seed=true", "train.seed", True),
        ("train.name=cat", "train.name", "cat"),
        ("train.name='a b: c, [d]'", "train.name", "a b: c, [d]"),
        ('train.name="1"', "train.name", "1"),
        ("train.name=", "train.name", ""),
        ("train.path=/data/x.y-z", "train.path", "/data/x.y-z"),
        ("train.seed=[1,[2,x],null]", "train.seed", [1, [2, "x"], None]),
        ("train.log={b:3,c:{d:4}}", "train.log", {"a": 1, "b": 3, "c": {"d": 4}}),
        ("+train.new.deep=1", "train.new.deep", 1),
        ("++train.seed=3", "train.seed", 3),
        ("train.none.x=1", "train.none.x", 1),
        ("loaders.0.workers=0", "loaders.0.workers", 0),
        ("loaders.1={workers:7}", "loaders.1.workers", 7),
        ("train.copy=${train.seed}", "train.copy", 1),
        ("train.seed=__import__('os').getcwd", "train.seed", None),
    ],
)
def test_values_are_read_in_hydras_grammar_and_never_evaluated(cfg, text, key, value):
    if "__import__" in text:
        with pytest.raises(ConfigError, match="__import__"):
            LazyConfig.apply_overrides(cfg, [text])
        return
    assert LazyConfig.apply_overrides(cfg, [text]) is cfg
    assert OmegaConf.select(cfg, key) == value


def test_a_tilde_deletes(cfg):
    LazyConfig.apply_overrides(cfg, ["~train.log.a", "~loaders.0", "~train.seed=1"])
    assert cfg.train.log == {"b": 2}
    assert cfg.loaders == [{"workers": 5}]
    assert "seed" not in cfg.train
    with pytest.raises(ConfigKeyError, match="Did you mean 'lr'"):
        LazyConfig.apply_overrides(cfg, ["~train.lrr"])
    with pytest.raises(ConfigError, match=r"is 0\.1"):
        LazyConfig.apply_overrides(cfg, ["~train.lr=7"])


@pytest.mark.parametrize(
    ("text", "error", "says"),
    [
        ("train.seed=1,2", ConfigError, r"train.seed=\[1,2\]"),
        ("train.seed=range(1,3)", ConfigError, "sweep"),
        ("train.seed.x=1", ConfigKeyError, "not a section"),
        ("train.seed", ConfigError, "key=value"),
        ("train.seed=[1,", ConfigError, r"train\.seed=\[1,"),
        ("=3", ConfigError, "=3"),
        ("train/x=1", ConfigError, "joined by dots"),
        ("train@x=1", ConfigError, "joined by dots"),
        ("loaders.7.workers=1", ConfigKeyError, "a list of 2"),
        ("loaders.x.workers=1", ConfigKeyError, "a list of 2"),
        ("train.x=${oc.create:{a:1}}", ConfigError, r"oc\.create"),
        ("train.x={y:'${oc.decode:1}'}", ConfigError, r"oc\.decode"),
        ("train.x='${oc.${y}:1}'", ConfigError, "refused"),
        ("train.x='${'", ConfigError, "interpolation"),
    ],
)
def test_an_invalid_override_is_an_error_that_names_it(cfg, text, error, says):
    before = OmegaConf.to_yaml(cfg.train)
    with pytest.raises(error, match=says) as caught:
        LazyConfig.apply_overrides(cfg, ["train.seed=5", text] if error is not ConfigKeyError else [text])
    assert repr(text) in str(caught.value)
    assert OmegaConf.to_yaml(cfg.train) == before  # nothing was applied


def test_a_declared_type_is_held(cfg):
    from dataclasses import dataclass

    @dataclass
    class Typed:
        count: int = 1

    typed = OmegaConf.create({"t": OmegaConf.structured(Typed)})
    with pytest.raises(ConfigTypeError, match=r"t\.count=x"):
        LazyConfig.apply_overrides(typed, ["t.count=x"])
    with pytest.raises(ConfigTypeError, match="got int"):
        LazyConfig.apply_overrides(cfg, [5])


def test_parents_that_are_interpolations_are_followed():
    cfg = OmegaConf.create({"a": {"x": 1}, "b": "${a}"})
    assert LazyConfig.apply_overrides(cfg, ["b.x=2"]).a.x == 2


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


def test_a_part_of_an_aliased_section_keeps_the_rest():
    cfg = OmegaConf.create({"train": {"activation_checkpoint": {"enabled": False, "own": 1}}})
    LazyConfig.apply_overrides(cfg, ["train.recompute_grad.enabled=true"])
    assert complete(cfg).train.activation_checkpoint == {"enabled": True, "own": 1}


@pytest.mark.parametrize("value", ["/data/a b\udc80", '/data/\udc80"q"', "'/data/\udc80'"])
def test_a_path_with_bytes_that_are_no_utf_8_needs_no_quotes(cfg, value):
    LazyConfig.apply_overrides(cfg, [f"train.path={value}"])
    assert cfg.train.path == value.strip("'")


@pytest.mark.parametrize(
    "text", ["a" + ".a" * 5000 + "=1", "x=" + "[" * 5000 + "]" * 5000, "x=" + "{a:" * 150 + "1" + "}" * 150]
)
def test_an_override_that_nests_too_deeply_is_refused(cfg, text):
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)  # Python's default, which other libraries raise
    try:
        with pytest.raises(ConfigError, match="override"):
            LazyConfig.apply_overrides(cfg, [text])
    finally:
        sys.setrecursionlimit(limit)
