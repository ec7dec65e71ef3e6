"""Classes and functions that take a configuration in place of arguments."""
# ruff: noqa: C408 - configurations are written with dict(...), as users write them

import inspect

import pytest
from omegaconf import OmegaConf

from trainwright.config import ConfigTypeError, LazyCall, configurable, instantiate


class Plain:
    """A class without from_config."""

    @configurable
    def __init__(self, a, b=2):
        """Of a and b."""
        self.values = (a, b)


class Translated:
    @configurable
    def __init__(self, a, b=2, c=3):
        self.values = (a, b, c)

    @classmethod
    def from_config(cls, cfg, b=5):
        return {"a": cfg["first"], "b": b}


class Child(Translated):
    def __init__(self, cfg, extra):
        super().__init__(cfg)
        self.extra = extra


@configurable(from_config=lambda cfg, **rest: {"a": cfg.first, **rest})
def function(a, b=2):
    """Of a."""
    return a, b


@pytest.mark.parametrize("make", [dict, lambda **kw: OmegaConf.create(kw)])
def test_without_from_config_a_mapping_is_the_arguments(make):
    assert Plain(make(a=1)).values == (1, 2)
    assert Plain(make(a=1), b=3).values == (1, 3)
    assert Plain(cfg=make(a=1), b=4).values == (1, 4)
    assert Plain(1, 2).values == Plain(a=1).values == (1, 2)


def test_from_config_turns_the_mapping_into_arguments_and_keywords_override():
    cfg = OmegaConf.create({"first": 9})
    assert Translated(cfg).values == (9, 5, 3)
    assert Translated(cfg=cfg, b=6).values == (9, 6, 3)
    assert Translated(cfg, c=7).values == (9, 5, 7)
    assert Translated(1, c=4).values == (1, 2, 4)
    assert Child(cfg, extra=1).values == (9, 5, 3)


def test_a_function_takes_a_configuration_too():
    cfg = OmegaConf.create({"first": 9})
    assert function(cfg) == (9, 2)
    assert function(cfg, b=1) == (9, 1)
    assert function(1, b=1) == (1, 1)


def test_signature_and_documentation_are_kept():
    assert list(inspect.signature(Plain).parameters) == ["a", "b"]
    assert Plain.__init__.__doc__ == "Of a and b."
    assert function.__doc__ == "Of a."
    assert function.__name__ == "function"


def test_lazy_calls_of_configurable_classes():
    assert instantiate(LazyCall(Plain)(dict(a=1))).values == (1, 2)
    assert instantiate(LazyCall(Translated)(cfg=dict(first=1))).values == (1, 5, 3)
    assert instantiate(LazyCall(function)(cfg=dict(first=1))) == (1, 2)
    with pytest.raises(ConfigTypeError, match="takes no argument 'bb'"):
        instantiate(LazyCall(Plain)(a=1, bb=2))


def test_wrong_uses_are_refused_when_they_are_seen():
    with pytest.raises(ConfigTypeError, match="__init__"):
        configurable(function)
    with pytest.raises(ConfigTypeError, match="cfg"):
        configurable(from_config=lambda config: {})
    with pytest.raises(ConfigTypeError, match="from_config"):
        configurable()

    class Wrong:
        @configurable
        def __init__(self, a):
            self.a = a

        def from_config(self, cfg):
            return {"a": 1}

    with pytest.raises(ConfigTypeError, match="classmethod"):
        Wrong({"x": 1})
