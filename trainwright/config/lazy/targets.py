"""Targets of lazy calls: objects by dotted path and back, and the arguments that a callable accepts."""

import dataclasses
import enum
import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any, Never, TypeVar, overload

from omegaconf import DictConfig

from trainwright.base.errors import ConfigImportError, ConfigTypeError, nearest_name
from trainwright.base.signatures import read_signature

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
    takes_cfg = "cfg" in read_signature(init_func).parameters

    @functools.wraps(init_func)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        from_config, is_config = getattr(type(self), "from_config", None), _is_called_with_config(args, kwargs)
        if is_config and from_config is not None:
            if not inspect.ismethod(from_config):
                raise ConfigTypeError(f"{type(self).__name__}.from_config must be a classmethod.")
            _check_first_parameter(from_config)
            args, kwargs = (), _arguments(from_config, args, kwargs)
        elif is_config and not takes_cfg:
            cfg, args = (args[0], args[1:]) if args else (kwargs.pop("cfg"), ())
            kwargs = {**{str(key): cfg[key] for key in cfg}, **kwargs}
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
    parameters = read_signature(from_config).parameters.values()
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        return dict(from_config(*args, **kwargs))
    names = {p.name for p in parameters}
    own = {name: value for name, value in kwargs.items() if name in names}
    rest = {name: value for name, value in kwargs.items() if name not in names}
    return {**from_config(*args, **own), **rest}


def _is_called_with_config(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    first = args[0] if args else kwargs.get("cfg")
    return isinstance(first, Mapping | DictConfig)


def _check_first_parameter(from_config: Callable[..., Any]) -> None:
    names = list(read_signature(from_config).parameters)
    if not names or names[0] != "cfg":
        raise ConfigTypeError(
            f"{getattr(from_config, '__qualname__', from_config)}{read_signature(from_config)}: "
            "the first parameter of a from_config must be called 'cfg'."
        )


_TORCH_HOMES = ("torch.nn.functional", "torch.linalg", "torch.special", "torch.fft")


def locate(path: str) -> Any:
    """The object at ``path``. The modules of the path are imported."""
    first, *rest = path.split(".")
    if not all(map(str.isidentifier, (first, *rest))):
        raise ConfigImportError(f"{path!r} is not the dotted path of an object, such as 'torch.nn.Linear'.")
    found: Any = _import(first, path)
    for index, part in enumerate(rest, start=1):
        try:
            found = getattr(found, part)
        except AttributeError:
            before = ".".join([first, *rest[: index - 1]])
            found = _import_submodule(found, part, before, path)
    return found


# Where a name without its module may be from.
_HOMES = ("torch.optim", "torch.optim.lr_scheduler", "torch.nn", "trainwright.optim", "trainwright.evaluation")


def _has(home: str, name: str) -> bool:
    module = sys.modules.get(home)
    return module is not None and "." not in name and (name in vars(module) or name in vars(module).get("__all__", ()))


def is_structured(obj: Any) -> bool:
    """Whether omegaconf would convert this class to a section: a dataclass, an attrs class, dict itself."""
    return isinstance(obj, type) and (obj is dict or dataclasses.is_dataclass(obj) or hasattr(obj, "__attrs_attrs__"))


def dotted_path(obj: Any) -> str | None:
    """The shortest dotted path of the class or function ``obj``, preferably a public one.

    None if it has none (a lambda, a local class).
    """
    path = _path_by_name(obj)
    if path is not None and "._" not in path:
        return path
    return _torch_path(obj) or path


def _path_by_name(obj: Any) -> str | None:
    module, name = getattr(obj, "__module__", None), getattr(obj, "__qualname__", None)
    if not isinstance(name, str):
        return None
    if module is None or name.startswith("_VariableFunctionsClass."):  # torch's built-in functions have no module
        module, name = "torch", name.rpartition(".")[2]
    if not isinstance(module, str) or "<" in name:
        return None
    parts = module.split(".")
    for length in range(1, len(parts) + 1):
        candidate = f"{'.'.join(parts[:length])}.{name}"
        if _leads_to(sys.modules.get(".".join(parts[:length])), name, obj):
            return candidate
    return None


def _torch_path(obj: Any) -> str | None:
    """The public path of a function of torch whose module is private (gelu: torch._C._nn) or missing."""
    if not inspect.isroutine(obj):
        return None
    for home in _TORCH_HOMES:
        for name, value in vars(sys.modules.get(home, object)).items():
            if value is obj and not name.startswith("_"):
                return f"{home}.{name}"
    return None


def short_name(target: Any) -> str:
    """The name of a target in messages: its dotted path, or its repr."""
    return target if isinstance(target, str) else dotted_path(target) or str(getattr(target, "__qualname__", target))


def _leads_to(module: ModuleType | None, name: str, obj: Any) -> bool:
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    # Each access to a classmethod creates an object, so identity is not enough.
    return found is not None and (found is obj or (inspect.ismethod(obj) and found == obj))


def _import(name: str, path: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name == name:
            near = next((f" Did you mean '{home}.{path}'?" for home in _HOMES if _has(home, path)), "")
            raise ConfigImportError(
                f"{path!r}: there is no module {name!r}."
                f"{near or ' Is its folder on sys.path, or the package installed?'}",
                name=name,
            ) from error
        raise ConfigImportError(f"{path!r}: importing {name!r} failed: {error}.") from error


def _import_submodule(parent: Any, part: str, before: str, path: str) -> ModuleType:
    if isinstance(parent, ModuleType) and hasattr(parent, "__path__"):
        submodule = f"{parent.__name__}.{part}"
        try:
            return importlib.import_module(submodule)
        except ModuleNotFoundError as error:
            if error.name != submodule:
                raise ConfigImportError(f"{path!r}: importing {submodule!r} failed: {error}.") from error
    public = [name for name in dir(parent) if not name.startswith("_")]
    raise ConfigImportError(f"{path!r}: {before!r} has no {part!r}.{nearest_name(part, public)}")


def named_arguments(target: Any, args: Sequence[Any]) -> str:
    """The call of ``target`` with ``args`` by their names, as a sentence; "" if they have none."""
    signature = signature_of(target) if callable(target) else None
    parameters = [] if signature is None else list(signature.parameters.values())
    if any(one.kind in (one.VAR_POSITIONAL, one.POSITIONAL_ONLY) for one in parameters[: len(args)]):
        return f" {short_name(target)} takes its parts by position alone: describe a function of yours that calls it."
    names = [one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD][: len(args)]
    if len(names) < len(args):
        return ""
    plain = isinstance(args[0], bool | int | float | str) if args else False
    shown = ", ".join(f"{n}={v!r}" if plain and isinstance(v, bool | int | float | str) else f"{n}=..."
                      for n, v in zip(names, args, strict=True))  # fmt: skip
    return f" Write LazyCall({short_name(target).rpartition('.')[2]})({shown})."


_MAX_SHOWN = 200  # characters of a signature in a message
_LENGTH = "'${train.train_iter}'"


def argument_fault(target: Callable[..., Any], kwargs: Mapping[str, Any], *, partial: bool = False) -> str | None:
    """Why ``target`` cannot be called with ``kwargs``, or None. ``partial``: other arguments are passed later."""
    signature = signature_of(target, kwargs)
    if signature is None:
        return None
    try:
        signature.bind_partial(**kwargs) if partial else signature.bind(**kwargs)
    except TypeError as error:
        if unknown := unknown_arguments(target, kwargs):
            return " ".join(unknown.values())
        needed = [one for one in signature.parameters.values() if one.default is one.empty and one.name not in kwargs]
        names = [one.name for one in needed if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
        if not names or len(names) < len(needed):
            return f"{_signature_text(target, signature)} cannot be called: {error}."
        values = {"T_max": _LENGTH, "total_iters": _LENGTH, "total_steps": _LENGTH}
        written = ", ".join(f"{name}={values.get(name, '...')}" for name in names)
        what = f" {_LENGTH} is the length of the run in iterations." if _LENGTH in written else ""
        if inspect.isfunction(target) and not kwargs:
            what = (
                f" If the function itself is meant: {short_name(target).rpartition('.')[2]}, without LazyCall and ()."
            )
        return f"{short_name(target)} needs {' and '.join(names)}: write {written} in its call.{what}"
    has_none = kwargs.get("total_steps") is None and None in (kwargs.get("epochs"), kwargs.get("steps_per_epoch"))
    if dotted_path(target) == "torch.optim.lr_scheduler.OneCycleLR" and has_none and not partial:  # all are optional
        return f"{short_name(target)} needs its length in iterations: total_steps={_LENGTH} is the run's."
    return None


def texts_for_bools(target: Callable[..., Any], kwargs: Mapping[str, Any]) -> dict[str, bool]:
    """The arguments that are texts where ``target`` takes true or false, which any text would be: whether it says so
    by an annotation, or has only a default of this type."""
    signature = signature_of(target, kwargs)
    given = {name for name, value in kwargs.items() if isinstance(value, str)}
    found = [] if signature is None else [one for one in signature.parameters.values() if one.name in given]
    own = {one.name: one.annotation in _BOOLS for one in found if type(one.default) is bool or one.annotation in _BOOLS}
    return {
        one.name: own[one.name] for one in found if one.name in own and (own[one.name] or one.annotation is one.empty)
    }


_BOOLS = (bool, bool | None, "bool", "bool | None", "Optional[bool]", "None | bool")


def unknown_arguments(target: Callable[..., Any], names: Iterable[str]) -> dict[str, str]:
    """The arguments in ``names`` that ``target`` does not accept, each with the text of an error.

    Missing arguments are not reported.
    """
    given = list(names)
    signature = signature_of(target, given)
    if signature is None:
        return {}
    parameters = signature.parameters.values()
    if any(p.kind is p.VAR_KEYWORD and p.annotation not in (Never, "Never") for p in parameters):
        return {}
    taken = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    text = f"{_signature_text(target, signature)} takes no argument"
    # The message shows the signature, so only the nearest parameter is named.
    return {n: f"{text} {n!r}.{_hint(n, taken)}" for n in given if n not in taken}


# Arguments of get_default_optimizer_params, which users look for beside those of the optimizer.
_OF_GROUPS = (
    "clip_grad_max_norm", "clip_grad_norm_type", "clip_grad_value", "weight_decay_norm", "weight_decay_bias",
    "overrides", "layer_decay",
)  # fmt: skip


def _hint(name: str, taken: Collection[str]) -> str:
    """The parameter that other libraries call ``name``, else one that is spelled almost so, as a sentence."""
    from trainwright.config.key_hints import keys_by_name, own_code_hint  # here: loads pydantic

    key = keys_by_name().get(name, "")
    here = key.rpartition(".")[2]
    if here in taken:
        return f" Did you mean {here!r}?"
    if near := nearest_name(name, taken):
        return near
    if name in _OF_GROUPS:
        key = f"optim.params.{name}"
    if key.startswith("optim.params.") and {"params", "lr"} <= set(taken):
        return f" Here it is {key}."
    if name == "type":  # as in MMEngine
        return " Another class is a lazy call: LazyCall(Class)(...), in YAML {_target_: module.Class}."
    return f" {own_code_hint(name)}".rstrip()


def signature_of(target: Callable[..., Any], names: Iterable[str] = ()) -> inspect.Signature | None:
    """The signature of ``target``; None for built-in callables without one, and for enums.

    Decorated functions have the signature of the decorator, which may accept more; only ours are unwrapped.
    """
    if inspect.isclass(target) and issubclass(target, enum.Enum):
        return None
    try:
        return read_signature(target, follow_wrapped=is_configurable(target) and "cfg" not in names)
    except (ValueError, TypeError):
        return None


def _signature_text(target: Callable[..., Any], signature: inspect.Signature) -> str:
    text = str(signature)
    if len(text) > _MAX_SHOWN:  # names alone
        text = f"({', '.join(signature.parameters)})"
    return short_name(target) + (text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "...")
