"""Changes from the command line."""

import sys

import pytest
from omegaconf import OmegaConf

from trainwright.config import ConfigError, ConfigKeyError, ConfigTypeError, LazyCall, LazyConfig


@pytest.fixture
def cfg():
    return OmegaConf.create(
        {
            "train": {"seed": 1, "lr": 0.1, "log": {"a": 1, "b": 2}, "none": None},
            "loaders": [{"workers": 4}, {"workers": 5}],
            "model": LazyCall(dict)(width=1),
            "link": "${train.log}",
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
        ("train.seed=None", "train.seed", None),
        ("train.seed='None'", "train.seed", "None"),
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
        ("link.a=7", "train.log.a", 7),  # the parent is an interpolation
    ],
)
def test_values_are_read_in_hydras_grammar(cfg, text, key, value):
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
        ("train.lr=", ConfigTypeError, "got '', and train.lr is 0.1"),
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
        ("train.seed=__import__('os').getcwd", ConfigError, "__import__"),  # nothing is evaluated
    ],
)
def test_an_invalid_override_is_an_error_that_names_it(cfg, text, error, says):
    before = OmegaConf.to_yaml(cfg.train)
    with pytest.raises(error, match=says) as caught:
        LazyConfig.apply_overrides(cfg, ["train.seed=5", text] if error is ConfigError else [text])
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


@pytest.mark.parametrize(
    "text", ["a" + ".a" * 1500 + "=1", "x=" + "[" * 1500 + "]" * 1500, "x=" + "{a:" * 150 + "1" + "}" * 150]
)
@pytest.mark.slow
def test_an_override_that_nests_too_deeply_is_refused(cfg, text):
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)  # Python's default, which other libraries raise
    try:
        with pytest.raises(ConfigError, match="override"):
            LazyConfig.apply_overrides(cfg, [text])
    finally:
        sys.setrecursionlimit(limit)


@pytest.mark.parametrize("value", ["no", "Off", "flase", "ture"])
def test_a_text_that_means_true_or_false_does_not_replace_one(value: str) -> None:
    cfg = LazyConfig.apply_overrides(OmegaConf.create({"bias": True, "mode": "a"}), ["mode=no", "bias=warn"])
    assert cfg == {"bias": "warn", "mode": "no"}  # words are values
    cfg.bias = True
    with pytest.raises(ConfigTypeError, match=rf"got '{value}' \(str\), and bias is True\. Write true or false"):
        LazyConfig.apply_overrides(cfg, [f"bias={value}"])


def test_an_index_in_brackets_names_the_key_to_write() -> None:
    cfg = OmegaConf.create({"test": [{"size": 1}, {"size": 2}]})
    with pytest.raises(ConfigError, match=r"an index of a list has a dot\. Write test\.1\.size=3"):
        LazyConfig.apply_overrides(cfg, ["test[1].size=3"])
