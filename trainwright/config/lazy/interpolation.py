"""Which ``${...}`` interpolations are allowed in untrusted data: reading other keys, but not building nodes."""

from typing import Any

from trainwright.config.errors import ConfigError

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


_SUGGESTION = "Write the value itself, or use a Python configuration file."


def _parts(tree: Any) -> list[Any]:
    below = [part for index in range(tree.getChildCount()) for part in _parts(tree.getChild(index))]
    return [tree, *below]
