"""Whether a callable takes the arguments that a configuration has for it."""

import enum
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from trainwright.config.errors import did_you_mean
from trainwright.config.lazy.configurables import is_configurable
from trainwright.config.lazy.dotted_path import short_name

_MAX_SHOWN = 200  # characters of a signature in a message


def argument_fault(target: Callable[..., Any], kwargs: Mapping[str, Any], *, partial: bool = False) -> str | None:
    """What is wrong with calling ``target`` with ``kwargs``, or None. ``partial``: more arguments may follow."""
    signature = signature_of(target, kwargs)
    if signature is None:
        return None
    try:
        signature.bind_partial(**kwargs) if partial else signature.bind(**kwargs)
    except TypeError as error:
        unknown = list(unknown_arguments(target, kwargs).values())
        return " ".join(unknown) or f"{_shown(target, signature)} cannot be called: {error}."
    return None


def unknown_arguments(target: Callable[..., Any], names: Iterable[str]) -> dict[str, str]:
    """Those of ``names`` that ``target`` does not take, each with what is wrong in words.

    What else it needs is not asked.
    """
    given = list(names)
    signature = signature_of(target, given)
    if signature is None:
        return {}
    return {
        name: f"{_shown(target, signature)} takes no argument {name!r}. {_nearest(name, signature)}".rstrip()
        for name in _unknown(signature, given)
    }


def signature_of(target: Callable[..., Any], names: Iterable[str] = ()) -> inspect.Signature | None:
    """None for built-in callables that have none, and for enums, whose call gives a member.

    A decorator may take more than the function it wraps, so this does not look through it, except through our own.
    """
    if inspect.isclass(target) and issubclass(target, enum.Enum):
        return None
    try:
        return inspect.signature(target, follow_wrapped=is_configurable(target) and "cfg" not in names)
    except (ValueError, TypeError):
        return None


def _unknown(signature: inspect.Signature, names: Iterable[str]) -> list[str]:
    parameters = signature.parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return []
    taken = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return [name for name in names if name not in taken]


def _nearest(name: str, signature: inspect.Signature) -> str:
    """The nearest parameter; all of them are in the signature shown."""
    hint = did_you_mean(name, signature.parameters)
    return hint if hint.startswith("Did") else ""


def _shown(target: Callable[..., Any], signature: inspect.Signature) -> str:
    text = str(signature)
    return short_name(target) + (text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "...")
