"""Objects by dotted path and back, and the arguments that they accept."""

from collections import Counter, OrderedDict
from dataclasses import dataclass

import pytest
from omegaconf import OmegaConf

from trainwright.config import (
    ConfigTypeError,
    LazyCall,
    LazyConfig,
    instantiate,
)
from trainwright.config.lazy.allowlist import allow_module


def strict(*, learning_rate, momentum=0.0):
    return learning_rate, momentum


def test_an_unknown_argument_names_path_signature_and_nearest_name():
    cfg = OmegaConf.create({"model": {"head": LazyCall(strict)(learning_rat=1)}}, flags={"allow_objects": True})
    with pytest.raises(ConfigTypeError) as caught:
        instantiate(cfg.model)
    text = str(caught.value)
    assert text.startswith("model.head [set in ")
    assert "test_targets.py:" in text
    assert "(*, learning_rate, momentum=0.0)" in text
    assert "'learning_rat'" in text
    assert "Did you mean 'learning_rate'?" in text
    with pytest.raises(ConfigTypeError, match=r"strict needs learning_rate: write learning_rate=\.\.\. in its call\.$"):
        instantiate(LazyCall(strict)(momentum=1))
    with pytest.raises(ConfigTypeError, match=r"If the function itself is meant: strict, without LazyCall and \(\)\."):
        instantiate(LazyCall(strict)())


def typed(*, types=1):
    return types


def test_the_nearest_argument_comes_before_what_another_library_means_by_type():
    with pytest.raises(ConfigTypeError, match=r"no argument 'type'\. Did you mean 'types'\?"):
        instantiate(LazyCall(typed)(type=1))


@dataclass
class Shape:
    channels: int = 1


class Part:
    def __init__(self, **kw):
        self.kw = kw


def collate(batch):
    return batch


def test_targets_are_written_as_the_shortest_path_and_build_again(tmp_path):
    cfg = OmegaConf.create({}, flags={"allow_objects": True})
    cfg.model = LazyCall(OrderedDict)(a=1)
    cfg.part = LazyCall(Part)(fn=collate, shape=Shape(2), cls=Counter, parts=[LazyCall(Part)(n="${model.a}")])
    LazyConfig.save(cfg, tmp_path / "c.yaml")
    text = (tmp_path / "c.yaml").read_text()
    assert "_target_: collections.OrderedDict" in text

    loaded = LazyConfig.load(tmp_path / "c.yaml")
    allow_module("collections")
    part = instantiate(loaded.part)
    assert part.kw["fn"] is collate
    assert part.kw["cls"] is Counter
    assert part.kw["shape"] == Shape(2)
    assert part.kw["parts"][0].kw == {"n": 1}
    assert instantiate(loaded.model) == OrderedDict(a=1)
