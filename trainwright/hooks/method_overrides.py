"""Which methods of an object the user has overridden, compared by identity."""

import dis
import logging
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from difflib import get_close_matches
from inspect import getattr_static, getsource, isfunction
from types import CodeType
from typing import Any, TypeVar

from trainwright.base.errors import ConfigTypeError
from trainwright.base.signatures import read_signature, shown_arguments
from trainwright.base.source_text import divides_by, lacks_return, leaves_unread
from trainwright.config import foreign_names

logger = logging.getLogger("trainwright.hooks")

_OF_LIGHTNING = ("training_step", "configure_optimizers")  # methods of a model of Lightning
_NEAR = 0.85  # a letter more, less or exchanged in a name of ten

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


def check_methods(
    owner: object, moments: Iterable[str], what: str, others: Mapping[str, str], known: Iterable[str] = ()
) -> None:
    """Check the user's methods of ``owner`` for ``moments``; warn of a name that is nearly one of them.

    Args:
        others: what methods of other libraries are called here.
        known: names that the caller has warned of.
    """
    kind, moments = type(owner), tuple(moments)
    if kind.__module__.startswith("trainwright."):
        return
    check_arguments(owner, moments)
    here = {name for each in kind.__mro__ if _is_ours(each) for name in vars(each)}
    own = [name for name in _methods_of_own(kind) if name in others and name not in here and not _is_used(kind, name)]
    for name in own:
        logger.warning("%s.%s is never called. Here it is %s.", kind.__name__, name, others[name])
    stops = any(_is_used(kind, name) for name in ("stop", "should_training_stop"))
    for name in () if stops else foreign_names.FLAGS:
        if _is_set_only(kind, name):
            logger.warning(
                "%s sets %s, which has no effect on the training. Here it is %s.", kind.__name__, name,
                "self.trainer.stop(reason)" if what == "hooks" else "self.trainercontrol.should_training_stop = True",
            )  # fmt: skip
    for name, meant in _misspelt(kind, moments):
        if name not in {*own, *known}:
            logger.warning("%s.%s is never called: %s have %s.", kind.__name__, name, what, meant)
    has = {name: hasattr(owner, name) for name in ("state_dict", "load_state_dict")}
    if len(set(has.values())) > 1:
        given, missing = sorted(has, key=has.__getitem__, reverse=True)
        logger.warning("%s has %s, but no %s: its state is not saved.", kind.__name__, given, missing)


def warn_of_misspelt(trainer: object) -> None:
    """Warn of the methods of a user's trainer that are nearly ones that it could override, or those of others."""
    kind = type(trainer)
    base = next(each for each in kind.__mro__ if _is_ours(each))
    methods = [name for name in dir(base) if name[0] != "_" and _code_of(getattr_static(base, name)) is not None]
    meant = {name: f"Did you mean {near}?" for name, near in _misspelt(kind, methods)}
    is_of_config = hasattr(base, "build_train_loader")
    others = foreign_names.METHODS_OF_CONFIGS if is_of_config else foreign_names.METHODS
    for name in _methods_of_own(kind):
        is_used = _is_used(kind, name) or _is_called_beside(kind, name)
        if name in others and not hasattr(base, name) and not is_used:
            meant[name] = f"Here it is {others[name]}."
    model = getattr(trainer, "model", None)
    has_steps = all(callable(getattr(model, name, None)) for name in _OF_LIGHTNING)
    if has_steps and not any(_is_used(kind, name) for name in _OF_LIGHTNING):
        logger.warning(
            "%s.%s are not called: forward computes the loss, or the scores for the setting loss, and the settings name"
            " the optimizer. Or override a step of the trainer.",
            type(model).__name__, " and ".join(_OF_LIGHTNING),
        )  # fmt: skip
    for name, hint in meant.items():
        logger.warning("%s.%s is never called by the training. %s", kind.__name__, name, hint)


def _misspelt(kind: type, known: Iterable[str]) -> list[tuple[str, str]]:
    """The user's methods of a class that are nearly called as one of ``known``, with that name.

    A method that another one of the class uses is a helper of theirs, and so is one beside the method that it is near.
    """
    base, found, known = next(each for each in kind.__mro__ if _is_ours(each)), [], tuple(known)
    own = _methods_of_own(kind)
    for name in own:
        near = get_close_matches(name, known, 1, _NEAR)
        if near and not hasattr(base, name) and near[0] not in own and not _is_used(kind, name):
            found.append((name, near[0]))
    return found


def _is_ours(kind: type) -> bool:
    return kind.__module__.startswith("trainwright.")


def _methods_of_own(kind: type) -> list[str]:
    """The names of the public methods that the user's classes define."""
    classes = [each for each in kind.__mro__ if each is not object and not _is_ours(each)]
    members = {name: member for each in reversed(classes) for name, member in vars(each).items()}
    return [name for name, member in members.items() if name[0] != "_" and _code_of(member) is not None]


def _code_of(member: Any) -> CodeType | None:
    """The code of a method in a class; None: it is another kind of member."""
    function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
    return function.__code__ if isfunction(function) else None


def _is_used(kind: type, name: str) -> bool:
    """Whether code of the user's classes has the name of the method."""
    return any(name in code.co_names for code in _codes_of(kind))


def _is_called_beside(kind: type, name: str) -> bool:
    """Whether the text of a module of the user's classes calls the method, as hooks beside a trainer may."""
    for module in {each.__module__ for each in kind.__mro__ if each is not object and not _is_ours(each)}:
        with suppress(OSError, TypeError, KeyError):  # its text is not known
            if f".{name}(" in getsource(sys.modules[module]):
                return True
    return False


def _codes_of(kind: type) -> Iterator[CodeType]:
    """The code of the user's classes, with the functions in it."""
    classes = [each for each in kind.__mro__ if not _is_ours(each)]
    codes = [code for each in classes for one in vars(each).values() if (code := _code_of(one)) is not None]
    while codes:
        code = codes.pop()
        yield code
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]


def _is_set_only(kind: type, name: str) -> bool:
    """Whether code of the user's classes sets this attribute of a trainer or a model, and never reads the name."""
    is_set = False
    for code in _codes_of(kind):
        before = None
        for step in dis.get_instructions(code) if name in code.co_names else ():
            if step.argval == name and step.opname != "STORE_ATTR":
                return False
            is_set |= step.argval == name and before in ("trainer", "model")
            before = step.argval
    return is_set


def check_arguments(owner: object, names: Iterable[str]) -> None:
    """Raise ConfigTypeError if a method of the user's does not take the arguments of the one that it overrides."""
    kind = type(owner)
    base = next(each for each in kind.__mro__ if each in _DEFINED)
    for name in names:
        if not is_overridden(owner, name):
            continue
        defined = _DEFINED[base][name]  # a program may have replaced that of the class
        is_of_class = isinstance(defined, classmethod)
        parameters = [*read_signature(defined.__func__ if is_of_class else defined).parameters.values()][1:]
        method = getattr(owner, name)
        try:
            with suppress(ValueError):  # it has no signature
                own = read_signature(method, follow_wrapped=False)
                own.bind(*parameters)  # a decorator may add some
                index = own.parameters.get("batch_idx")
                if index is not None and index.default is index.empty:  # of Lightning, whose step gets other arguments
                    raise TypeError
        except TypeError:
            arguments = [each.name for each in parameters]
            written = [
                each.name if each.default is each.empty else f"{each.name}={each.default}" for each in parameters
            ]
            line = f"def {name}({', '.join(['cls' if is_of_class else 'self', *written])})"
            raise ConfigTypeError(
                f"{kind.__name__}.{name} is called with ({', '.join(arguments)}): it takes {shown_arguments(method)};"
                f" write {f'@classmethod, and below it {line}' if is_of_class else line}."
            ) from None


def unset_attribute(owner: object, name: str, *, has_begun: bool) -> str | None:
    """Why an attribute of a user's object is missing, where its ``__init__`` is the reason.

    ``has_begun``: whether ``__init__`` of the library's class has been called.
    """
    kind = type(owner)
    if name.startswith("__"):
        return None
    setter = next((each for each in kind.__mro__ if not _is_ours(each) and _sets(each, name)), None)
    if setter is not None and has_begun:
        return (
            f"{kind.__name__} has no attribute {name!r} yet: {setter.__name__}.__init__ sets it after"
            f" super().__init__(...), which calls the methods of this trainer. Set self.{name} before it."
        )
    if not has_begun and (hasattr(kind, name) or (setter is None and not _is_ours(kind))):
        return f"{kind.__name__}.__init__ has not called super().__init__(...), and self.{name} is missing."
    return None


def _sets(kind: type, name: str) -> bool:
    """Whether ``__init__`` of a class sets this attribute of self."""
    code = _code_of(vars(kind).get("__init__"))
    steps = () if code is None or name not in code.co_names else dis.get_instructions(code)
    return any(step.opname == "STORE_ATTR" and step.argval == name for step in steps)


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

    def uses(self, name: str) -> bool:
        """Whether code of the user's classes has a name, such as that of a method that it calls."""
        return _is_used(type(self._owner()), name)

    def lacks_return(self, name: str) -> bool:
        """Whether a method of the user's :func:`has no return <trainwright.base.source_text.lacks_return>`."""
        return self.has(name) and lacks_return(getattr(type(self._owner()), name))

    def divides_by(self, name: str, attribute: str) -> bool:
        """Whether a method of the user's divides by an attribute, such as a setting."""
        return self.has(name) and divides_by(getattr(self._owner(), name), attribute)

    def leaves_unread(self, name: str, section: str, others: Collection[str]) -> bool:
        """Whether a method of the user's uses its first argument for ``others`` only, and no section of this name."""
        return self.has(name) and leaves_unread(getattr(self._owner(), name), section, others)

    @property
    def kind(self) -> str:
        return type(self._owner()).__name__
