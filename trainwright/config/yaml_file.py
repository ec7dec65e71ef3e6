"""YAML as data: safe types only, numbers like ``1e-3`` as numbers, a key given twice as an error, bounded in size.

Interpolations may read other keys, but build no nodes.
"""

import enum
import functools
import numbers
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from trainwright.base.errors import ConfigError, ConfigTypeError, MissingFileError, nearest_name
from trainwright.config.torch_names import GivenName

if TYPE_CHECKING:
    from omegaconf import DictConfig


# PyYAML follows YAML 1.1, where 1e-3 is text and 12:30:00 a number of seconds.
_FLOAT = re.compile(
    r"^(?:[-+]?[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+"
    r"|[-+]?\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
_INT = re.compile(r"^(?:[-+]?0b[0-1_]+|[-+]?0x[0-9a-fA-F_]+|[-+]?(?:0|[1-9][0-9_]*))$")
MAX_DEPTH = 50  # levels of nesting; the functions that walk a configuration recurse
_TOO_DEEP = f"more than {MAX_DEPTH} levels of nesting"
MAX_REPEATED = 10_000  # values that aliases repeat; ten lines of ten aliases each stand for 10**10 values
_REPLACED = ("tag:yaml.org,2002:float", "tag:yaml.org,2002:int", "tag:yaml.org,2002:timestamp")


class Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML ships no types
    """Safe loader with the resolvers of this module and limits on nesting and aliases."""

    def get_single_node(self) -> yaml.Node | None:
        try:
            node = super().get_single_node()
        except RecursionError:
            raise yaml.composer.ComposerError(None, None, _TOO_DEEP) from None
        sizes: dict[yaml.Node, tuple[int, int] | None] = {}
        num_values, levels = (0, 0) if node is None else _measured(node, sizes)
        if levels > MAX_DEPTH:
            raise yaml.composer.ComposerError(None, None, _TOO_DEEP)
        if num_values - len(sizes) > MAX_REPEATED:
            raise yaml.composer.ComposerError(None, None, f"aliases repeat more than {MAX_REPEATED} values")
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"):
            if key.value in seen:
                text = f"the key {key.value!r} is given twice"
                raise yaml.constructor.ConstructorError(None, None, text, key.start_mark)
            seen.add(key.value)
        found: dict[Any, Any] = super().construct_mapping(node, deep)
        return found


def _measured(node: yaml.Node, sizes: dict[yaml.Node, tuple[int, int] | None]) -> tuple[int, int]:
    """The numbers of values and of levels of a node. Aliases refer to nodes, so each is measured once."""
    if node in sizes:
        if (known := sizes[node]) is None:
            text = "an alias is inside the node that it repeats"
            raise yaml.composer.ComposerError(None, None, text, node.start_mark)
        return known
    sizes[node] = None
    items = [] if isinstance(node, yaml.ScalarNode) else node.value
    below = [_measured(part, sizes) for item in items for part in (item if isinstance(item, tuple) else (item,))]
    size = 1 + sum(num for num, _ in below), 1 + max((levels for _, levels in below), default=0)
    sizes[node] = size
    return size


class Dumper(yaml.SafeDumper):  # type: ignore[misc]  # PyYAML ships no types
    """Safe dumper that quotes text which :class:`Loader` would read as a number."""


for _class in (Loader, Dumper):
    _class.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in _REPLACED]
        for first, resolvers in _class.yaml_implicit_resolvers.items()
    }
    _class.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))
    _class.add_implicit_resolver("tag:yaml.org,2002:int", _INT, list("-+0123456789"))


def check_values(owner: str, values: Mapping[str, Any], *, or_else: str = "") -> None:
    """Raise ConfigTypeError, which names the key and ``owner``, if YAML cannot represent a value."""
    for key, value in values.items():
        try:
            yaml.dump(value, Dumper=Dumper)
        except yaml.YAMLError as error:
            raise ConfigTypeError(
                f"{owner}.{key}: got {value!r}, which a YAML file cannot hold; use text, numbers, lists and dicts of"
                f" these{or_else}."
            ) from error


def plain(value: Any, *, others_as_text: bool = False) -> Any:
    """``value`` in the types of YAML and JSON, if possible, with new dicts and lists.

    Enum members become their values, paths and devices text, tuples, tensors and arrays lists, numbers of numpy those
    of Python, and objects with a ``to_dict`` its result. Other values are unchanged, or text.
    """
    inner = functools.partial(plain, others_as_text=others_as_text)
    if isinstance(value, enum.Enum):
        return inner(value.value)
    if value is None or type(value) in (bool, int, float, str, GivenName):
        return value
    if isinstance(value, Mapping):
        return {inner(key): inner(item) for key, item in value.items()}
    if isinstance(value, list | tuple) or (others_as_text and isinstance(value, set)):
        return [inner(item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "to_dict") and not isinstance(value, type):
        return inner(value.to_dict())
    if hasattr(value, "tolist") and not isinstance(value, numbers.Number):  # a tensor or an array
        return inner(value.tolist())
    if isinstance(value, str) or type(value).__name__ == "device":  # a torch.device; torch need not be imported here
        return str(value)
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    return str(value) if others_as_text else value


def to_text(content: Any, *, flow: bool | None = False) -> str:
    """The content of a file of settings, in their order. ``flow=None``: lists and dicts of plain values on one line."""
    text: str = yaml.dump(
        content, Dumper=Dumper, default_flow_style=flow, sort_keys=False, allow_unicode=True, width=9999
    )
    return text


def load_yaml(filename: str | os.PathLike[str]) -> "DictConfig":
    """The configuration in a YAML file, marked as data."""
    from omegaconf import DictConfig  # here: writing settings does not need it

    from trainwright.config.lazy.provenance import distrust, set_origin

    content = read_mapping(filename)
    check_interpolations(content, str(filename))
    cfg = DictConfig(content, flags={"allow_objects": True})
    distrust(cfg)
    set_origin(cfg, os.path.abspath(filename))
    return cfg


FORMAT = 1  # of saved files: the number in their last line
_FORMAT_LINE = "# Format:"


def with_format(text: str) -> str:
    """The text of a saved file, with the number of its format."""
    return f"{text}{_FORMAT_LINE} {FORMAT}\n"


def is_saved(text: str) -> bool:
    """Whether the text is that of a saved file."""
    return f"\n{_FORMAT_LINE}" in text


def _check_format(text: str, filename: str | os.PathLike[str]) -> None:
    found = text.rstrip().rpartition("\n")[2].removeprefix(_FORMAT_LINE).strip()
    if found.isdecimal() and int(found) > FORMAT and _FORMAT_LINE in text:
        raise ConfigError(
            f"{filename}: format {found}; this version of trainwright reads {FORMAT}. A newer version has written it:"
            " update trainwright."
        )


def read_mapping(filename: str | os.PathLike[str]) -> dict[Any, Any]:
    """The mapping in a YAML file as plain values. An empty file is an empty mapping.

    Raises:
        ConfigError: it is not such a file, or a newer version has written it.
    """
    try:
        text = regular_file(filename).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{filename}: not a text file: {error}") from error
    _check_format(text, filename)
    try:
        content = yaml.load(text, Loader=Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{filename}: not valid as a YAML configuration (python tags are not read): {error}"
        ) from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{filename}: a configuration is a mapping of sections, not {type(content).__name__}.")
    return content


def regular_file(filename: str | os.PathLike[str]) -> Path:
    """The path of a config file. Pipes and devices are refused, because opening them could block forever."""
    path = Path(filename)
    if path.is_file():
        return path
    if path.exists():
        kind = "a folder" if path.is_dir() else "a pipe, a socket or a device"
        above = [path.parent, path.parent.parent] if (path / "manifest.json").is_file() else []  # of a checkpoint
        near = [path / "config.yaml", path / "config.py", *(folder / "config.yaml" for folder in above)]
        hint = next((f" Did you mean {str(one)!r}?" for one in near if one.is_file()), "")
        raise ConfigError(f"{filename}: this is {kind}; a configuration is read from a regular file.{hint}")
    try:
        working_folder = os.getcwd()
    except FileNotFoundError:
        working_folder = "deleted"
    text = f"there is no such configuration file (working folder: {working_folder})."
    if not path.parent.is_dir():
        raise MissingFileError(f"{filename}: {text}")
    files = [one.name for one in path.parent.iterdir() if one.suffix == path.suffix]
    others = [one.name for one in path.parent.iterdir() if one.suffix in (".py", ".yaml", ".yml")]
    hint = nearest_name(path.name, files) or nearest_name(path.name, others)
    raise MissingFileError(f"{filename}: {text}{hint}")


_ALLOWED = ("oc.select", "oc.dict.keys", "oc.dict.values")
# A dict or list inside ${...}, for example as a resolver's default, looks like one from trusted code.
_LITERALS = ("DictContainerContext", "ListContainerContext")


def check_interpolations(value: Any, where: str) -> None:
    """Raise ConfigError if an interpolation in ``value`` (text, lists and dicts) does more than read other keys."""
    for text in _texts(value):
        from omegaconf.errors import GrammarParseError  # here: most files have no interpolation
        from omegaconf.grammar_parser import parse

        try:
            tree = parse(text)
        except GrammarParseError as error:
            raise ConfigError(f"{where}: {text!r} is not a valid interpolation: {error}") from error
        for part in _parts(tree):
            if type(part).__name__ in _LITERALS:
                raise ConfigError(
                    f"{where}: {text!r} is refused: a dict or list inside ${{...}} could be a node. {_SUGGESTION}"
                )
            if hasattr(part, "resolverName") and (name := part.resolverName().getText()) not in _ALLOWED:
                raise ConfigError(
                    f"{where}: {text!r} is refused: the resolver {name!r} may not be used here, only"
                    f" {', '.join(_ALLOWED)}. {_SUGGESTION}"
                )


def _texts(value: Any) -> Iterator[str]:
    """The texts with an interpolation."""
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list | tuple):
        for child in value:
            yield from _texts(child)
    elif isinstance(value, str) and "${" in value:
        yield value


_SUGGESTION = "Write the value itself, or use a Python configuration file."


def _parts(tree: Any) -> list[Any]:
    below = [part for index in range(tree.getChildCount()) for part in _parts(tree.getChild(index))]
    return [tree, *below]
