"""What a run is: a tree of lazy calls and settings, written in Python or YAML, checked as a whole before it starts."""

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
from trainwright.config.lazy import LazyCall, LazyConfig
from trainwright.config.lookup import try_get_key
from trainwright.config.packaged import get_config

__all__ = [
    "LazyCall",
    "LazyConfig",
    "instantiate",
    "configurable",
    "get_config",
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
