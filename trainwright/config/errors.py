"""Errors that users can cause. Their messages say where, what value was found, what is allowed and what to do."""

import difflib
from collections.abc import Iterable

from trainwright.terminal import printable


class UserError(Exception):
    """Root of the errors that a user can cause and fix. The command line prints them without a traceback, exit 2."""

    def __str__(self) -> str:
        return printable(super().__str__())


class ConfigError(UserError, ValueError):
    """A configuration that cannot run."""


class ConfigTypeError(ConfigError, TypeError):
    """A value of the wrong type in a configuration."""


class ConfigKeyError(ConfigError, KeyError):
    """A key that does not exist."""

    def __str__(self) -> str:  # KeyError shows its argument's repr, which mangles a message of several lines
        return printable(str(self.args[0])) if self.args else ""


class ConfigImportError(UserError, ImportError):
    """A configuration file imports a module or names a target that does not exist."""


class ConfigSyntaxError(UserError, SyntaxError):
    """A configuration file that is not valid Python."""


class MissingFileError(UserError, FileNotFoundError):
    """A file or folder that a run needs does not exist."""


def did_you_mean(name: str, allowed: Iterable[str]) -> str:
    """The nearest allowed name as a sentence, or the list of all of them when none is near.

    >>> did_you_mean("precison", ["precision", "seed"])
    "Did you mean 'precision'?"
    >>> did_you_mean("x", ["seed", "amp"])
    'Allowed: amp, seed.'
    """
    names = sorted(allowed)
    nearest = difflib.get_close_matches(name, names, n=1)
    if nearest:
        return f"Did you mean {nearest[0]!r}?"
    return f"Allowed: {', '.join(names)}." if names else "Nothing is allowed here."
