"""The validator of all configurations: pydantic checks the types, and its errors become our messages.

A type states in :class:`Allowed` what a message lists as allowed. A section is a ``TypedDict`` of such types.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError
from typing_extensions import is_typeddict  # pydantic requires these TypedDicts before Python 3.12

from trainwright.config.errors import ConfigError, ConfigKeyError, ConfigTypeError, Fault, did_you_mean, got


@dataclass(frozen=True, slots=True)
class Allowed:
    """The values that a setting accepts, as the end of the sentence "it must be ..."."""

    text: str


def type_fault(kind: type, value: Any) -> str | None:
    """The text of the error if ``value`` is not of the type ``kind``. A bool is not a number."""
    try:
        _adapter(kind).validate_python(value, strict=True)
    except ValidationError:
        return f"{got(value)}; it must be of type {kind.__name__}."
    return None


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def section_faults(kind: Any, values: Mapping[str, Any]) -> list[Fault]:
    """The faults of ``values``, checked as the TypedDict ``kind``."""
    try:
        _adapter(kind).validate_python(values)
    except ValidationError as error:
        return faults_of(error, kind, values)
    return []


def faults_of(error: ValidationError, kind: Any, values: Mapping[str, Any]) -> list[Fault]:
    """One fault for each value that pydantic refused, though it reports one error for each alternative of a type.

    Args:
        kind: the model or TypedDict that was validated.
        values: its input.
    """
    found: dict[str, Fault] = {}
    for entry in error.errors(include_url=False, include_input=False):
        fault = _fault(entry["type"], entry["loc"], get_type_hints(kind, include_extras=True), values)
        earlier = found.setdefault(fault.path, fault)
        if earlier.kind is not fault.kind:  # an alternative accepts this type, but not this value
            found[fault.path] = Fault(fault.path, earlier.text)
    return list(found.values())


def _fault(error_type: str, loc: Sequence[int | str], fields: Mapping[str, Any], values: Any) -> Fault:
    """Follow ``loc`` through nested sections. It may continue into a list or into the alternatives of a type."""
    path: list[str] = []
    for key in loc:
        path.append(str(key))
        where = ".".join(path)
        if error_type == "extra_forbidden" and key not in fields:
            return Fault(where, f"no such key. {_right_place(path, fields)}", ConfigKeyError)
        hint = fields[str(key)]
        if error_type == "missing" and key not in values:
            nearest = did_you_mean(str(key), [name for name in values if name not in fields])
            return Fault(
                where, f"missing; give {allowed_text(hint, str(key))}. {nearest if 'mean' in nearest else ''}".rstrip()
            )
        value, section = values[key], _section(hint)
        if len(path) == len(loc) or section is None:
            break
        fields, values = get_type_hints(section, include_extras=True), value
    is_type = error_type.endswith("_type") or (error_type == "literal_error" and not isinstance(value, str))
    kind = ConfigTypeError if is_type else ConfigError
    return Fault(where, f"{got(value)}; it must be {allowed_text(hint, path[-1])}.", kind)


def allowed_text(hint: Any, name: str = "") -> str:
    """The text of the :class:`Allowed` of a type; a section without one is shown by an example."""
    text = next((item.text for item in getattr(hint, "__metadata__", ()) if isinstance(item, Allowed)), None)
    if text is None:
        section = _section(hint)
        assert section is not None, "a type that is not a section states what it allows"
        text = f"a section, for example {name}=dict({next(iter(get_type_hints(section)))}=...)"
    return text


def _section(hint: Any) -> Any:
    """The TypedDict among the alternatives of a type, or None."""
    hint = hint.__origin__ if get_origin(hint) is Annotated else hint
    return next((kind for kind in (hint, *get_args(hint)) if is_typeddict(kind)), None)


def _right_place(path: Sequence[str], fields: Mapping[str, Any]) -> str:
    """A suggestion for an unknown key: the section that has a key of this name, else the nearest name."""
    *above, name = path
    for group, hint in fields.items():
        section = _section(hint)
        if section is not None and name in get_type_hints(section) and name != "enabled":  # in many sections
            return f"Did you mean '{'.'.join([*above, group, name])}'?"
    return did_you_mean(name, fields)
