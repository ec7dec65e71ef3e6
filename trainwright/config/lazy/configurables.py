"""``@configurable``: functions and classes that also accept one configuration in place of their arguments."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, overload

from omegaconf import DictConfig

from trainwright.config.errors import ConfigTypeError

_F = TypeVar("_F", bound=Callable[..., Any])
_MARK = "__trainwright_configurable__"


@overload
def configurable(init_func: _F) -> _F: ...
@overload
def configurable(*, from_config: Callable[..., Mapping[str, Any]]) -> Callable[[_F], _F]: ...
def configurable(
    init_func: Callable[..., Any] | None = None, *, from_config: Callable[..., Mapping[str, Any]] | None = None
) -> Any:
    """Make an ``__init__`` or a function callable with a configuration in place of its arguments.

    ``@configurable`` on ``__init__``: a mapping, as the first positional argument or as ``cfg=``, is converted to the
    arguments by the classmethod ``from_config(cls, cfg, ...)``. Without ``from_config``, the mapping is the arguments.
    ``@configurable(from_config=f)`` on a function: ``f(cfg, ...)`` returns the arguments. Other keyword arguments
    override those of the configuration; the parameters of ``from_config`` are passed to it.

    >>> class Net:
    ...     @configurable
    ...     def __init__(self, width=1):
    ...         self.width = width
    >>> Net({"width": 3}).width, Net(width=2).width
    (3, 2)
    """
    if init_func is not None:
        if not inspect.isfunction(init_func) or init_func.__name__ != "__init__":
            raise ConfigTypeError(
                "@configurable without arguments decorates __init__. On a function use @configurable(from_config=...)."
            )
        return _wrap_init(init_func)
    if from_config is None:
        raise ConfigTypeError(
            "configurable() needs from_config, a function that converts a configuration to arguments."
        )
    _check_first_parameter(from_config)
    return functools.partial(_wrap_function, from_config=from_config)


def is_configurable(target: Any) -> bool:
    """Whether ``target`` is a function with ``@configurable``, or a class whose ``__init__`` has it."""
    function = inspect.getattr_static(target, "__init__") if isinstance(target, type) else target
    return getattr(function, _MARK, False) is True


def takes_config(target: Any) -> bool:
    """Whether ``target`` converts a configuration to other arguments, so that its keys are not the arguments."""
    return is_configurable(target) and (not isinstance(target, type) or hasattr(target, "from_config"))


def _wrap_init(init_func: Callable[..., None]) -> Callable[..., None]:
    takes_cfg = "cfg" in inspect.signature(init_func).parameters

    @functools.wraps(init_func)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        from_config = getattr(type(self), "from_config", None)
        if from_config is None:
            if _is_called_with_config(args, kwargs) and not takes_cfg:
                args, kwargs = args[1:], {**_config_of(args, kwargs), **_without_cfg(args, kwargs)}
            init_func(self, *args, **kwargs)
        elif _is_called_with_config(args, kwargs):
            if not inspect.ismethod(from_config):
                raise ConfigTypeError(f"{type(self).__name__}.from_config must be a classmethod.")
            _check_first_parameter(from_config)
            init_func(self, **_arguments(from_config, args, kwargs))
        else:
            init_func(self, *args, **kwargs)

    setattr(wrapped, _MARK, True)
    return wrapped


def _wrap_function(
    function: Callable[..., Any], *, from_config: Callable[..., Mapping[str, Any]]
) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if _is_called_with_config(args, kwargs):
            return function(**_arguments(from_config, args, kwargs))
        return function(*args, **kwargs)

    setattr(wrapped, _MARK, True)
    return wrapped


def _arguments(
    from_config: Callable[..., Mapping[str, Any]], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The result of ``from_config``, which gets the arguments that it names; the others override its result."""
    parameters = inspect.signature(from_config).parameters.values()
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        return dict(from_config(*args, **kwargs))
    names = {p.name for p in parameters}
    own = {name: value for name, value in kwargs.items() if name in names}
    rest = {name: value for name, value in kwargs.items() if name not in names}
    return {**from_config(*args, **own), **rest}


def _is_called_with_config(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    first = args[0] if args else kwargs.get("cfg")
    return isinstance(first, Mapping | DictConfig)


def _config_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    cfg = args[0] if args else kwargs["cfg"]
    return {str(key): cfg[key] for key in cfg}


def _without_cfg(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return dict(kwargs) if args else {name: value for name, value in kwargs.items() if name != "cfg"}


def _check_first_parameter(from_config: Callable[..., Any]) -> None:
    names = list(inspect.signature(from_config).parameters)
    if not names or names[0] != "cfg":
        raise ConfigTypeError(
            f"{getattr(from_config, '__qualname__', from_config)}{inspect.signature(from_config)}: "
            "the first parameter of a from_config must be called 'cfg'."
        )
