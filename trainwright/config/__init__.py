"""Configurations of runs: lazy calls and settings, written in Python or YAML and checked before the run starts."""

from typing import TYPE_CHECKING

from trainwright.base.lazy_names import declared_names

if TYPE_CHECKING:
    from trainwright.base.errors import ConfigError as ConfigError
    from trainwright.base.errors import ConfigImportError as ConfigImportError
    from trainwright.base.errors import ConfigKeyError as ConfigKeyError
    from trainwright.base.errors import ConfigSyntaxError as ConfigSyntaxError
    from trainwright.base.errors import ConfigTypeError as ConfigTypeError
    from trainwright.base.errors import MissingFileError as MissingFileError
    from trainwright.base.errors import UserError as UserError
    from trainwright.config.arguments import default_argument_parser as default_argument_parser
    from trainwright.config.lazy.instantiation import instantiate as instantiate
    from trainwright.config.lazy.lazy_config import LazyCall as LazyCall
    from trainwright.config.lazy.lazy_config import LazyConfig as LazyConfig
    from trainwright.config.lazy.lazy_config import get_config as get_config
    from trainwright.config.lazy.lazy_config import try_get_key as try_get_key
    from trainwright.config.lazy.targets import configurable as configurable
    from trainwright.config.settings import TrainerConfig as TrainerConfig
    from trainwright.config.settings import TrainingConfig as TrainingConfig
    from trainwright.config.settings import dump_default_yaml as dump_default_yaml
    from trainwright.config.settings import get_config_help as get_config_help
    from trainwright.config.torch_names import LRSchedulerType as LRSchedulerType
    from trainwright.config.torch_names import OptimizerType as OptimizerType
    from trainwright.config.torch_names import PrecisionType as PrecisionType
    from trainwright.config.torch_names import TaskType as TaskType
    from trainwright.config.training.metric_config import MetricConfig as MetricConfig

if not TYPE_CHECKING:  # a type checker would take any name for one of the package
    __all__, __getattr__ = declared_names(__name__)
