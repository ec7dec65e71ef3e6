"""Which ``${...}`` interpolations are allowed in untrusted data: reading other keys, but not building nodes."""

import re
from collections.abc import Iterator
from typing import Any

from trainwright.config.errors import ConfigError

MAX_EXPANDED = 10_000  # values that one interpolation may stand for, over all that it refers to
_REFERENCE = re.compile(r"\$\{\s*(?:oc\.[\w.]+:)?\s*([\w.\[\]-]+)")

# An allow-list, because resolvers that the program registers can do anything with their arguments.
_ALLOWED = ("oc.select", "oc.dict.keys", "oc.dict.values")
# A dict or list inside ${...}, for example as a resolver's default, looks like one from trusted code.
_LITERALS = ("DictContainerContext", "ListContainerContext")


def check_interpolations(value: Any, where: str) -> None:
    """Raise for interpolations in ``value`` (text, or lists and dicts of text) that do more than read other keys."""
    if isinstance(value, dict):
        for key, child in value.items():
            check_interpolations(key, where)
            check_interpolations(child, where)
    elif isinstance(value, list | tuple):
        for child in value:
            check_interpolations(child, where)
    elif isinstance(value, str) and "${" in value:
        _check_text(value, where)


def _check_text(text: str, where: str) -> None:
    from omegaconf.errors import GrammarParseError
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


def check_expansion(content: Any, where: str) -> None:
    """Raise where interpolations refer to interpolations that refer to others …, so that reading one takes forever.

    Counted is what ``${...}`` stands for, without expanding it: each key once, however often it is referred to.
    """
    sizes: dict[tuple[str, ...], int] = {}

    def size_of(path: tuple[str, ...]) -> int:
        if path not in sizes:
            sizes[path] = 1  # a circle of references is OmegaConf's own error
            sizes[path] = min(_measure(path), MAX_EXPANDED + 1)
        return sizes[path]

    def _measure(path: tuple[str, ...]) -> int:
        value = _at(content, path)
        if isinstance(value, dict | list):
            return 1 + sum(size_of((*path, key)) for key, _ in _children(value))
        return 1 + sum(map(size_of, _references(value, path)))

    for path, text in _texts(content, ()):
        try:
            size = size_of(path)
        except RecursionError as error:
            raise ConfigError(f"{where}: {'.'.join(path)}: too many interpolations refer to one another.") from error
        if size > MAX_EXPANDED:
            raise ConfigError(
                f"{where}: {'.'.join(path)}: {text!r} stands for more than {MAX_EXPANDED:,} values, because the"
                " interpolations that it refers to repeat each other. Write the value itself."
            )


def _texts(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    if isinstance(value, dict | list):
        for key, child in _children(value):
            yield from _texts(child, (*path, key))
    elif isinstance(value, str) and "${" in value:
        yield path, value


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    return ((str(key), child) for key, child in pairs)


def _at(content: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        content = dict(_children(content)).get(key) if isinstance(content, dict | list) else None
    return content


def _references(text: Any, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """The absolute paths of the keys that a text refers to; ``${.key}`` begins at the node that holds the text."""
    for reference in _REFERENCE.findall(text) if isinstance(text, str) else ():
        name = reference.lstrip(".")
        num_dots = len(reference) - len(name)
        base = path[: len(path) - num_dots] if num_dots else ()
        yield (*base, *filter(None, re.split(r"[.\[\]]+", name)))


_SUGGESTION = "Write the value itself, or use a Python configuration file."


def _parts(tree: Any) -> list[Any]:
    below = [part for index in range(tree.getChildCount()) for part in _parts(tree.getChild(index))]
    return [tree, *below]
