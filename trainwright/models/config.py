"""Model configs: dataclasses that are saved beside the weights as ``model_config.yaml``."""

from dataclasses import dataclass
from typing import ClassVar

from trainwright.config.yaml_config import YamlConfig

CONFIG_NAME = "model_config.yaml"


@dataclass
class ModelConfig(YamlConfig):
    """Base of model configs: a dataclass with a class attribute ``name``, the name its model is registered under.

    >>> @dataclass
    ... class TinyConfig(ModelConfig):
    ...     name = "tiny"
    ...     width: int = 8
    >>> print(TinyConfig(width=4).to_yaml(), end="")
    name: tiny
    config_type: model
    width: 4
    """

    name: ClassVar[str] = ""
    config_type: ClassVar[str] = "model"
    filename: ClassVar[str] = CONFIG_NAME
