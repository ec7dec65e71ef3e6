"""YAML as data: safe types only, numbers like ``1e-3`` as numbers, a key given twice as an error, bounded in size."""

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from trainwright.config.errors import ConfigError, MissingFileError
from trainwright.config.lazy.interpolation import check_expansion, check_interpolations

if TYPE_CHECKING:
    from omegaconf import DictConfig

# PyYAML follows YAML 1.1, where 1e-3 is text and 12:30:00 a number of seconds.
_FLOAT = re.compile(
    r"^(?:[-+]?[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+"
    r"|[-+]?\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
_INT = re.compile(r"^(?:[-+]?0b[0-1_]+|[-+]?0x[0-9a-fA-F_]+|[-+]?(?:0|[1-9][0-9_]*))$")
MAX_DEPTH = 50  # levels of nesting; the functions that walk a configuration recurse
MAX_REPEATED = 10_000  # values that aliases repeat; ten lines of ten aliases each stand for 10**10 values
_REPLACED = ("tag:yaml.org,2002:float", "tag:yaml.org,2002:int", "tag:yaml.org,2002:timestamp")


class Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML ships no types
    """Safe loader with the resolvers of this module, which refuses what grows or nests without bounds."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = 0
        # Of each node that is complete: the values in it, and its levels. Aliases name nodes, so each is measured once.
        self._sizes: dict[yaml.Node, tuple[int, int]] = {}
        self._num_repeated = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        is_alias, mark = self.check_event(yaml.AliasEvent), self.peek_event().start_mark
        self._depth += 1
        levels = self._depth
        if levels <= MAX_DEPTH:
            node = super().compose_node(parent, index)
            if is_alias and node not in self._sizes:
                raise yaml.composer.ComposerError(None, None, "an alias stands inside of what it repeats", mark)
            if not is_alias:
                self._sizes[node] = self._measure(node)
            num_values, height = self._sizes[node]
            levels += height - 1
            self._num_repeated += num_values if is_alias else 0
        if levels > MAX_DEPTH:
            raise yaml.composer.ComposerError(None, None, f"more than {MAX_DEPTH} levels of nesting", mark)
        if self._num_repeated > MAX_REPEATED:
            raise yaml.composer.ComposerError(None, None, f"aliases repeat more than {MAX_REPEATED} values", mark)
        self._depth -= 1
        return node

    def _measure(self, node: yaml.Node) -> tuple[int, int]:
        if isinstance(node, yaml.ScalarNode):
            return 1, 1
        below = [part for item in node.value for part in (item if isinstance(item, tuple) else (item,))]
        sizes = [self._sizes[part] for part in below]
        return 1 + sum(num for num, _ in sizes), 1 + max((height for _, height in sizes), default=0)

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

    from trainwright.config.lazy.provenance import distrust, set_origin

    content = read_mapping(filename)
    check_interpolations(content, str(filename))
    check_expansion(content, str(filename))
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
    try:
        text = regular_file(filename).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
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


def regular_file(filename: str | os.PathLike[str]) -> Path:
    """The path of a configuration file, for reading: opening a named pipe or a device could wait without end.

    Raises:
        MissingFileError: there is no such file.
        ConfigError: there is something else.
    """
    path = Path(filename)
    if path.is_file():
        return path
    if path.exists():
        kind = "a folder" if path.is_dir() else "a pipe, a socket or a device"
        raise ConfigError(f"{filename}: this is {kind}; a configuration is read from a regular file.")
    raise MissingFileError(f"{filename}: there is no such configuration file (working folder: {_working_folder()}).")


def _working_folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return "deleted"
