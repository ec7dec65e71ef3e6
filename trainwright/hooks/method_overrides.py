"""Which methods of an object the user has overridden, compared by identity."""

import logging
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from difflib import get_close_matches
from inspect import getattr_static, signature
from typing import Any, TypeVar

from trainwright.base.errors import ConfigTypeError

logger = logging.getLogger("trainwright.hooks")

Kind = TypeVar("Kind", bound=type)

# Methods of each extensible class when it was defined: a method replaced on the class later differs.
# Looked up statically, without binding, so that class methods and partial methods compare equal.
_DEFINED: dict[type, dict[str, Any]] = {}


def overridable(kind: Kind) -> Kind:
    """Class decorator: :func:`is_overridden` compares with the current methods of ``kind``."""
    _DEFINED[kind] = {name: getattr_static(kind, name) for name in dir(kind) if not name.startswith("_")}
    return kind


def is_overridden(owner: object, name: str) -> bool:
    """Whether ``owner.name`` is the user's instead of that of the nearest :func:`overridable` class.

    It is the user's if a subclass or a mixin defines it (decorated, a ``functools.partialmethod`` …), or if it was
    assigned to the object or to one of its classes.
    """
    own = vars(owner)
    if name in own:
        return True
    kind = owner.__class__  # not its type: hooks have a weak proxy of their trainer
    base = next(each for each in kind.__mro__ if each in _DEFINED)
    return getattr_static(kind, name) is not _DEFINED[base][name]


def check_methods(owner: object, moments: Iterable[str], what: str) -> None:
    """Check the user's methods of ``owner`` for ``moments``; warn of a name that is nearly one of them."""
    kind, moments = type(owner), tuple(moments)
    if kind.__module__.startswith("trainwright."):
        return
    check_arguments(owner, moments)
    base = next(each for each in kind.__mro__ if each in _DEFINED)
    for name in vars(kind):
        if not hasattr(base, name) and (near := get_close_matches(name, moments, 1, 0.85)):
            logger.warning("%s.%s is never called: %s have %s.", kind.__name__, name, what, near[0])
    has = {name: hasattr(owner, name) for name in ("state_dict", "load_state_dict")}
    if len(set(has.values())) > 1:
        given, missing = sorted(has, key=has.__getitem__, reverse=True)
        logger.warning("%s has %s, but no %s: its state is not saved.", kind.__name__, given, missing)


def check_arguments(owner: object, names: Iterable[str]) -> None:
    """Raise ConfigTypeError if a method of the user's does not take the arguments of the one that it overrides."""
    kind = type(owner)
    base = next(each for each in kind.__mro__ if each in _DEFINED)
    for name in names:
        arguments = [*signature(getattr(base, name)).parameters][1:]
        method = getattr(owner, name)
        if not is_overridden(owner, name):
            continue
        try:
            with suppress(ValueError):  # it has no signature
                signature(method).bind(*arguments)
        except TypeError:
            raise ConfigTypeError(
                f"{kind.__name__}.{name} is called with ({', '.join(arguments)}): write"
                f" def {name}({', '.join(['self', *arguments])})."
            ) from None


class Overrides:
    """The user's methods of an object, which its parts call in place of their own. Does not keep the object alive."""

    def __init__(self, owner: object) -> None:
        self._owner = weakref.ref(owner)

    def has(self, *names: str) -> bool:
        """Whether the user has overridden one of these methods."""
        owner = self._owner()
        return any(is_overridden(owner, name) for name in names)

    def of(self, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
        """The user's method ``name``, or ``default``."""
        owner = self._owner()
        method: Callable[..., Any] = getattr(owner, name) if is_overridden(owner, name) else default
        return method

    def assigned(self, *names: str) -> tuple[Any, ...]:
        """What was assigned to the object itself under these names; None: nothing."""
        return tuple(map(vars(self._owner()).get, names))

    @property
    def kind(self) -> str:
        return type(self._owner()).__name__
