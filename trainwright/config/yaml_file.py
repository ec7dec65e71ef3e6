"""YAML as data: safe types only, numbers like ``1e-3`` as numbers, a key given twice as an error."""

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from trainwright.config.errors import ConfigError, MissingFileError
from trainwright.config.interpolation import check_interpolations

if TYPE_CHECKING:
    from omegaconf import DictConfig

# PyYAML follows YAML 1.1, where 1e-3 is text and 12:30:00 a number of seconds.
_FLOAT = re.compile(
    r"^(?:[-+]?[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+"
    r"|[-+]?\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
_INT = re.compile(r"^(?:[-+]?0b[0-1_]+|[-+]?0x[0-9a-fA-F_]+|[-+]?(?:0|[1-9][0-9_]*))$")
_REPLACED = ("tag:yaml.org,2002:float", "tag:yaml.org,2002:int", "tag:yaml.org,2002:timestamp")


class Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML ships no types
    """Safe loader with the resolvers of this module."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.value in seen and isinstance(key_node, yaml.ScalarNode) and key_node.value != "<<":
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key_node.value!r} is given twice", key_node.start_mark
                )
            if isinstance(key_node, yaml.ScalarNode):
                seen.add(key_node.value)
        found: dict[Any, Any] = super().construct_mapping(node, deep)
        return found


class Dumper(yaml.SafeDumper):  # type: ignore[misc]  # PyYAML ships no types
    """Safe dumper that quotes what :class:`Loader` would take for a number, and repeats what occurs twice."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _class in (Loader, Dumper):
    _class.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in _REPLACED]
        for first, resolvers in _class.yaml_implicit_resolvers.items()
    }
    _class.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))
    _class.add_implicit_resolver("tag:yaml.org,2002:int", _INT, list("-+0123456789"))


def load_yaml(filename: str | os.PathLike[str]) -> "DictConfig":
    """The configuration in a YAML file, marked as data."""
    from omegaconf import DictConfig  # here: settings are written without it

    from trainwright.config.provenance import distrust, set_origin

    content = read_mapping(filename)
    check_interpolations(content, str(filename))
    cfg = DictConfig(content, flags={"allow_objects": True})
    distrust(cfg)
    set_origin(cfg, os.path.abspath(filename))
    return cfg


def read_mapping(filename: str | os.PathLike[str]) -> dict[Any, Any]:
    """The mapping that a YAML file holds, as plain values; of an empty file an empty one.

    Raises:
        MissingFileError: there is no such file.
        ConfigError: it is no YAML, or no mapping.
    """
    path = Path(filename)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise MissingFileError(
            f"{filename}: there is no such configuration file (working folder: {Path.cwd()})."
        ) from error
    except (UnicodeDecodeError, IsADirectoryError) as error:
        raise ConfigError(f"{filename}: not a text file: {error}") from error
    try:
        content = yaml.load(text, Loader=Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{filename}: not valid as a YAML configuration (python tags are not read): {error}"
        ) from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(
            f"{filename}: the top of a configuration is a mapping of sections, not {type(content).__name__}."
        )
    return content
