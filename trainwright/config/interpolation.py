"""What ``${...}`` may do in text that is data: point at other keys and read values, but not build nodes."""

from typing import Any

from trainwright.config.errors import ConfigError

# These turn text into config nodes, so a target could be hidden in a string.
_BUILDERS = ("oc.create", "oc.decode")


def check_interpolations(value: Any, where: str) -> None:
    """Refuse in ``value`` (text, or plain lists and dicts of it) the resolvers that build nodes out of text."""
    if isinstance(value, dict):
        for child in value.values():
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
    for name in _resolver_names(tree):
        # A name that is itself put together from other values could become any of the builders.
        if name in _BUILDERS or "${" in name:
            raise ConfigError(
                f"{where}: {text!r} is refused: the resolver {name!r} could build a config node out of text. Write the "
                "value itself, or use a Python configuration file."
            )


def _resolver_names(tree: Any) -> list[str]:
    own = [tree.resolverName().getText()] if hasattr(tree, "resolverName") else []
    count = tree.getChildCount()
    return own + [name for index in range(count) for name in _resolver_names(tree.getChild(index))]
