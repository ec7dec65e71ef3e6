"""What a run is: a tree of lazy calls and settings, written in Python or YAML, checked as a whole before it starts."""

import importlib
from typing import TYPE_CHECKING

from trainwright.config.arguments import default_argument_parser
from trainwright.config.configurable import configurable
from trainwright.config.enums import LRSchedulerType, OptimizerType, PrecisionType, TaskType
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
    from trainwright.config.metric_config import MetricConfig
    from trainwright.config.setting_help import dump_default_yaml, get_config_help
    from trainwright.config.trainer_config import TrainerConfig
    from trainwright.config.training_config import TrainingConfig

__all__ = [
    "LazyCall",
    "LazyConfig",
    "instantiate",
    "configurable",
    "get_config",
    "TrainingConfig",
    "TrainerConfig",
    "TaskType",
    "OptimizerType",
    "LRSchedulerType",
    "PrecisionType",
    "MetricConfig",
    "get_config_help",
    "dump_default_yaml",
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


# The names that need pydantic, which a config file does not.
_FILE_OF = {
    "TrainingConfig": "training_config",
    "TrainerConfig": "trainer_config",
    "MetricConfig": "metric_config",
    "get_config_help": "setting_help",
    "dump_default_yaml": "setting_help",
}


def __getattr__(name: str) -> object:
    if name not in _FILE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_FILE_OF[name]}"), name)
    globals()[name] = value  # found directly from now on
    return value
