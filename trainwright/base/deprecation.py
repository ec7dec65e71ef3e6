"""Names that a later version removes: one warning each, which says what to use instead and when the name goes.

A name stays for two minor versions: one that is deprecated in 0.3 is removed in 0.5.
"""

import sys
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

_T = TypeVar("_T", bound=Callable[..., Any])

# Other names of settings that are removed, and the version that deprecated them: names of ``TrainingConfig``, and keys
# of config files as ``train.NAME``. Each is an alias of the setting that replaces it.
SETTINGS: dict[str, str] = {}

_warned: set[str] = set()


def deprecated(since: str, use: str) -> Callable[[_T], _T]:
    """A function, method or class whose first call, or each from another line, warns of its removal.

    >>> import warnings
    >>> @deprecated("0.3", use="fit()")
    ... def fit_model() -> int:
    ...     return 1
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("default")
    ...     (fit_model(), str(caught[0].message))
    (1, 'fit_model is deprecated since version 0.3 and is removed in 0.5. Use fit().')
    """

    def decorate(target: _T) -> _T:
        from typing_extensions import deprecated as library  # with its attribute __deprecated__, which tools read

        return library(_text(target.__qualname__, since, use), category=FutureWarning)(target)

    return decorate


def warn_of_setting(name: str, use: str) -> None:
    """Warn once in a process if ``name``, a name of a setting, is deprecated."""
    if name in SETTINGS and name not in _warned:
        _warned.add(name)
        warnings.warn(_text(name, SETTINGS[name], use), FutureWarning, stacklevel=_level_of_user())


def removed_in(since: str) -> str:
    """The version that removes what ``since`` has deprecated."""
    major, minor = map(int, since.split(".")[:2])
    return f"{major}.{minor + 2}"


def _text(name: str, since: str, use: str) -> str:
    return f"{name} is deprecated since version {since} and is removed in {removed_in(since)}. Use {use}."


def _level_of_user() -> int:
    """The ``stacklevel`` of a warning of the caller that names the first line outside of this package."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "trainwright":
        level, frame = level + 1, frame.f_back
    return level
