"""What a run is: a tree of lazy calls and settings, written in Python or YAML, checked as a whole before it starts."""

from typing import TYPE_CHECKING

from trainwright.config.arguments import default_argument_parser
from trainwright.config.configurable import configurable
from trainwright.config.errors import (
    ConfigError,
    ConfigImportError,
    ConfigKeyError,
    ConfigSyntaxError,
    ConfigTypeError,
    MissingFileError,
    UserError,
)
from trainwright.config.instantiate import instantiate
from trainwright.config.lazy import LazyConfig
from trainwright.config.lazy_call import LazyCall
from trainwright.config.lookup import try_get_key
from trainwright.config.packaged import get_config

if TYPE_CHECKING:
    from trainwright.config.training_config import TrainingConfig

__all__ = [
    "LazyCall",
    "LazyConfig",
    "instantiate",
    "configurable",
    "get_config",
    "TrainingConfig",
    "try_get_key",
    "default_argument_parser",
    "UserError",
    "ConfigError",
    "ConfigTypeError",
    "ConfigKeyError",
    "ConfigImportError",
    "ConfigSyntaxError",
    "MissingFileError",
]


def __getattr__(name: str) -> object:
    if name != "TrainingConfig":  # the one name that needs pydantic, which a config file does not
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from trainwright.config.training_config import TrainingConfig

    globals()[name] = TrainingConfig
    return TrainingConfig
