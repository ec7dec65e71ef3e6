"""A configuration without faults, whose targets need nothing but this file."""

import pytest
from omegaconf import OmegaConf

from trainwright.config import ConfigError, LazyCall
from trainwright.config.config_file.checks import validate
from trainwright.config.config_file.sections import complete


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
