"""Errors that users can cause. Their messages name the place, the value, the allowed values and a fix."""

import difflib
import functools
import importlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from trainwright.base.signatures import read_signature, shown_arguments
from trainwright.base.terminal import printable

F = TypeVar("F", bound=Callable[..., Any])


class UserError(Exception):
    """Base of errors that a user can cause and fix. The command line prints the message only.

    Attributes:
        exit_code: that of the command: 2 for an error before a training, and 1 for one in it.
    """

    exit_code = 2

    def __str__(self) -> str:
        return printable(super().__str__())


class ConfigError(UserError, ValueError):
    """A configuration that cannot run."""


class ConfigTypeError(ConfigError, TypeError):
    """A value of the wrong type in a configuration."""


class ConfigKeyError(ConfigError, KeyError):
    """A key that does not exist."""

    def __str__(self) -> str:  # KeyError shows the repr of its argument, with escaped line breaks
        return printable(str(self.args[0])) if self.args else ""


class ConfigImportError(UserError, ImportError):
    """A configuration file imports a module or names a target that does not exist."""


class ConfigSyntaxError(UserError, SyntaxError):
    """A configuration file that is not valid Python."""


class MissingFileError(UserError, FileNotFoundError):
    """A file or folder that a run needs does not exist."""


def import_optional(name: str, message: str, kind: type[UserError] = UserError) -> Any:
    """The module ``name`` of an optional package; an error of ``kind`` with ``message`` if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise kind(message) from error


@dataclass(frozen=True, slots=True)
class Fault:
    """One error in a configuration. ``origin`` is the file and line that set it, if known."""

    path: str
    text: str
    kind: type[ConfigError] = ConfigError
    origin: str | None = None

    def __str__(self) -> str:
        return f"{self.path}: {self.text}"


def error_of(faults: Sequence[Fault], message: str) -> ConfigError:
    """An error with this message, of the class that all faults share, else a plain ConfigError."""
    kinds = {fault.kind for fault in faults}
    return (kinds.pop() if len(kinds) == 1 else ConfigError)(message)


def got(value: Any) -> str:
    """How messages show a value that is not allowed."""
    return f"got {value!r} ({type(value).__name__})"


def did_you_mean(name: str, allowed: Iterable[str]) -> str:
    """The nearest allowed name as a sentence, or the list of all of them when none is near.

    >>> did_you_mean("precison", ["precision", "seed"])
    "Did you mean 'precision'?"
    >>> did_you_mean("x", ["seed", "amp"])
    'Allowed: amp, seed.'
    """
    names = sorted(allowed)
    if hint := nearest_name(name, names):
        return hint.lstrip()
    return f"Allowed: {', '.join(names)}." if names else "Nothing is allowed here."


def nearest_name(name: str, allowed: Iterable[str]) -> str:
    """The nearest allowed name as the next sentence of a message, with a space before it; "" if none is near."""
    found = nearest_of(name, allowed)
    return "" if found is None else f" Did you mean {found!r}?"


def checked_arguments(hint: Callable[[str], str] = lambda name: "", usage: str = "") -> Callable[[F], F]:
    """Decorate a method: a call that does not fit its signature is a ConfigTypeError, with the nearest names.

    Args:
        hint: what a name of other libraries is called here, as a sentence; "" if it is not known.
        usage: what to write; by default the message has the signature.

    >>> class Bar:
    ...     @checked_arguments()
    ...     def __init__(self, total, width=1): ...
    >>> Bar(size=3)
    Traceback (most recent call last):
    trainwright.base.errors.ConfigTypeError: Bar: there is no argument 'size'. The call is Bar(total, width=1).
    """

    def decorate(function: F) -> F:
        signature = read_signature(function)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                name, own = function.__qualname__.removesuffix(".__init__"), [*signature.parameters][1:]
                form = name + shown_arguments(function, is_bound=False)
                write = f"Write {usage}." if usage else f"The call is {form}."
                unknown = [one for one in kwargs if one not in own]
                hints = {one: hint(one) or nearest_name(one, own).strip() for one in unknown}
                faults = [f"{name}: there is no argument {one!r}. {found}".rstrip() for one, found in hints.items()]
                text = " ".join(faults) or f"{name}: {error}."
                raise ConfigTypeError(f"{text} {write}") from None
            return function(*args, **kwargs)

        call.__signature__ = signature  # type: ignore[attr-defined]  # also where decorators are not followed
        return call  # type: ignore[return-value]  # it has the same signature

    return decorate


def nearest_of(name: str, allowed: Iterable[str]) -> str | None:
    """The nearest name, whatever its case, hyphens and underscores: also one that begins so, or has these initials.

    >>> nearest_of("adamww", ["Adam", "AdamW"]), nearest_of("mse", ["mean_squared_error", "loss"])
    ('AdamW', 'mean_squared_error')
    >>> nearest_of("acc", ["Acc@1", "Acc@2", "Acc@3", "Acc@4", "Acc@5"])
    'Acc@1'
    """
    wanted, names = _letters(name), sorted(allowed)
    if near := _closest(name, names, 0.9):
        return near
    letters = {_letters(one): one for one in reversed(names)}
    initials = {"".join(_INITIAL.findall(one)).lower(): one for one in reversed(names)}
    if wanted not in letters and wanted in initials and len(wanted) > 2:
        return initials[wanted]
    longer = sorted((one for one in letters if len(wanted) > 1 and one.startswith(wanted)), key=len)
    near = _closest(wanted, letters, 0.8) or next(iter(longer), None) or _closest(wanted, letters, 0.6)
    return None if near is None else letters[near]


def _closest(word: str, names: Iterable[str], cutoff: float) -> str | None:
    """The most similar name, of several the first in the alphabet: difflib takes the last."""
    found = difflib.get_close_matches(word, listed := [*names], n=len(listed) or 1, cutoff=cutoff)
    ratios = {one: difflib.SequenceMatcher(a=one, b=word).ratio() for one in found}
    return min(found, key=lambda one: (-ratios[one], one), default=None)


_INITIAL = re.compile(r"[A-Z](?=[a-z])|(?:(?<=_)|^)[a-z]")


def _letters(name: str) -> str:
    return re.sub(r"[\W_]", "", name).lower()


def missing_path(path: Path, text: str) -> MissingFileError:
    """The error about a path that does not exist, or its first part that does not, with the nearest name there is."""
    while not path.parent.is_dir() and path != path.parent:
        path = path.parent
    entries = path.parent.iterdir() if path.parent.is_dir() else ()
    names = [entry.name for entry in entries if entry.name != path.name]  # there may be a file in place of a folder
    near = nearest_of(path.name, names)
    return MissingFileError(f"{path}: {text}" + (f" Did you mean {str(path.with_name(near))!r}?" if near else ""))
