"""The types of settings, and the validator of all configurations: pydantic checks them, its errors become our messages.

A type states in :class:`Allowed` what a message lists as allowed. A section is a ``TypedDict`` of such types.
"""

import functools
import json
import math
import os
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Any, Literal, Required, get_args, get_origin, get_type_hints

from pydantic import AfterValidator, BeforeValidator, Field, TypeAdapter, ValidationError, WithJsonSchema
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict, is_typeddict  # pydantic takes no others before Python 3.12

from trainwright.base.errors import (
    ConfigError,
    ConfigKeyError,
    ConfigTypeError,
    Fault,
    did_you_mean,
    got,
    nearest_name,
)
from trainwright.config.foreign_names import inner_key_hint, value_hint
from trainwright.config.torch_names import TaskType, WarmupSchedule

WORDS_OF_BOOL = {
    "true": True,
    "yes": True,
    "on": True,
    "1": True,
    "false": False,
    "no": False,
    "off": False,
    "0": False,
}
_MAX_SUGGESTED = 40  # characters of a text that is shown again


@dataclass(frozen=True, slots=True)
class Allowed:
    """The values that a setting accepts, as the end of the sentence "it must be ..."."""

    text: str


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


# The sentence about an unknown key: its path and the keys that are allowed there.
_Hint = Callable[[Sequence[str], Iterable[str]], str]


def _nearest_key(path: Sequence[str], allowed: Iterable[str]) -> str:
    return did_you_mean(path[-1], allowed)


def converted(kind: Any, value: Any) -> Any:
    """A value as its type has it: 1e4 as a whole number. One that is not allowed is unchanged."""
    try:
        return _adapter(kind).validate_python(value, strict=True)
    except ValidationError:
        return value


def section_faults(kind: Any, values: Mapping[str, Any], hint: _Hint = _nearest_key) -> list[Fault]:
    """The faults of ``values``, checked as the TypedDict ``kind``."""
    try:
        _adapter(kind).validate_python(values)
    except ValidationError as error:
        return faults_of(error, kind, values, hint)
    return []


def faults_of(error: ValidationError, kind: Any, values: Mapping[str, Any], hint: _Hint = _nearest_key) -> list[Fault]:
    """One fault for each value that pydantic refused, though it reports one error for each alternative of a type.

    Args:
        kind: the model or TypedDict that was validated.
        values: its input.
        hint: what to write about an unknown key.
    """
    found: dict[str, Fault] = {}
    for entry in error.errors(include_url=False, include_input=False):
        fault = _fault(entry["type"], entry["loc"], get_type_hints(kind, include_extras=True), values, hint)
        earlier = found.setdefault(fault.path, fault)
        if earlier.kind is not fault.kind:  # an alternative accepts this type, but not this value
            found[fault.path] = Fault(fault.path, earlier.text)
    return list(found.values())


def _fault(error_type: str, loc: Sequence[int | str], fields: Mapping[str, Any], values: Any, hint_of: _Hint) -> Fault:
    """Follow ``loc`` through nested sections. It may continue into a list or into the alternatives of a type."""
    path: list[str] = []
    for key in loc:
        path.append(str(key))
        where = ".".join(path)
        if error_type == "extra_forbidden" and key not in fields:
            meant = inner_key_hint(path[-2], path[-1]) if len(path) > 1 else ""
            meant = meant or _right_place(path, fields) or hint_of(path, fields)
            return Fault(where, f"no such key. {meant}", ConfigKeyError)
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
    text = f"{got(value)}; it must be {allowed_text(hint, path[-1])}."
    for suggest in _SUGGESTIONS:
        if suggestion := suggest(hint, value, where):
            text += f" {suggestion}"
            break
    return Fault(where, text, kind)


# What to write instead of a value, as a sentence; "" if it is not known.


def _as_others(hint: Any, value: Any, where: str) -> str:
    """For a value of another library."""
    return value_hint(where, value)


def _nearest_word(hint: Any, value: Any, where: str) -> str:
    """For a word that is near to one that is allowed, and for what others call a device."""
    if not isinstance(value, str):
        return ""
    if value.lower().partition(":")[0] == "gpu" and "'cuda'" in allowed_text(hint):
        return "Did you mean 'cuda'?"
    words = [text[1:-1] for text in _alternatives(hint) if re.fullmatch(r"'\w+'", text)]
    return nearest_name(value, words).lstrip()


def _as_list(hint: Any, value: Any, where: str) -> str:
    """Where a list of texts is accepted, and one text was given."""
    if not isinstance(value, str) or len(value) > _MAX_SUGGESTED:
        return ""
    words = [one for one in re.split(r"[,\s]+", value) if one]
    listed = words if words and all(re.fullmatch(r"[\w.]+", one) for one in words) else [value]
    return "" if converted(hint, listed) is listed else f"Write {_line(where, listed)}."


_FACTORS = {"k": 1000, "m": 1_000_000}
# The unit of a text such as "5ep", and the settings that count it.
_COUNTED_UNITS = {
    r"ep|epochs?": r".*(num_epochs|train_epoch|_n_epoch)",
    r"ba|batch(es)?": r".*(_batches|eval_iter)",
    r"ba|batch(es)?|steps?|it|iters?|iterations?": (
        r".*((?<!accumulation)_steps|train_iter|every_n_iteration|period|ema\.(warmup|start|every))"
    ),
}


def _is_counted(where: str, unit: str) -> bool:
    """Whether the setting at ``where`` counts in ``unit``."""
    return any(
        re.fullmatch(units, unit, re.IGNORECASE) and re.fullmatch(settings, where)
        for units, settings in _COUNTED_UNITS.items()
    )


def _as_one(hint: Any, value: Any, where: str) -> str:
    """For a tuple or list of one, which a comma at the end of a line makes, and for an object of a path."""
    if isinstance(value, list | tuple) and len(value) == 1 and _takes(hint, value[0]):
        return f"Write {value[0]!r}, without a comma at the end of the line, or brackets."
    if isinstance(value, os.PathLike) and _takes(hint, os.fspath(value)):
        return f"Write {os.fspath(value)!r}, or str(...) of it."
    return ""


def _as_number(hint: Any, value: Any, where: str) -> str:
    """Where a number is accepted, and its text was given."""
    if not isinstance(value, str) or len(value) > _MAX_SUGGESTED:
        return ""
    if (counted := re.fullmatch(r"(\d+)\s*([a-z]+)", value, re.IGNORECASE)) is not None:
        unit = counted[2].lower()
        count = int(counted[1]) * _FACTORS.get(unit, 1)
        return f"Write {count}." if (unit in _FACTORS or _is_counted(where, unit)) and _takes(hint, count) else ""
    try:
        number = float(value) if re.search(r"[.eE]", value) else int(value)
        _adapter(hint).validate_python(number, strict=True)
    except (ValueError, ValidationError):
        return ""
    return f"Write {value.strip()}, without quotes."


def _as_bool(hint: Any, value: Any, where: str) -> str:
    """For a text that means true or false."""
    word = WORDS_OF_BOOL.get(value.lower()) if isinstance(value, str) and _takes_bool(hint) else None
    return "" if word is None else f"Write {word}."


# Of sections that are not switched on by True alone.
_EXAMPLES: dict[str, dict[str, Any]] = {
    "early_stopping": {"patience": 3},
    "ema": {"decay": 0.999},
    "model_checkpoint": {"every_n_epoch": 1},
}
# The keys that a single value may mean, by their sections: the first one that takes it.
_MEANT = {
    "early_stopping": ("patience", "min_delta", "monitor"),
    "ema": ("decay",),
    "model_checkpoint": ("every_n_epoch",),
    "tensorboard": ("log_dir",),
    "checkpointer": ("period",),
    "evaluation": ("eval_period",),
    "zero_optimization": ("stage",),
}


def _in_section(hint: Any, value: Any, where: str) -> str:
    """Where a section is accepted, and the value of one of its keys, or True or False, was given."""
    section = _section(hint)
    if section is None or value is None or isinstance(value, Mapping):
        return ""
    name, word = where.rpartition(".")[2], WORDS_OF_BOOL.get(str(value).lower())
    keys = get_type_hints(section, include_extras=True)
    if word is not None and "enabled" in keys:
        return f"Write {where}.enabled={word}."
    if isinstance(value, str) and re.fullmatch(r"\d*\.?\d+", value):
        value = float(value) if "." in value else int(value)
    elif word is not None and isinstance(value, str):
        value = word
    if isinstance(value, bool):
        return f"Write {_line(where, _EXAMPLES[name])}." if value and name in _EXAMPLES else ""
    key = next((key for key in _MEANT.get(name, ()) if _takes(keys[key], value)), None)
    if key is None or not value or (key == "decay" and not isinstance(value, float)):
        return ""
    return f"Write {_line(where, {key: value}) if _takes(hint, None) else _line(f'{where}.{key}', value)}."


def _line(where: str, value: Any) -> str:
    """The line that sets a value: of Python, or, for a key of config files, an override as a shell takes it.

    >>> _line("ema", {"decay": 0.999}), _line("train.ema", {"decay": 0.999})
    ("ema={'decay': 0.999}", "'train.ema={decay: 0.999}'")
    """
    return shlex.quote(f"{where}={_in_override(value)}") if where.startswith("train.") else f"{where}={value!r}"


def _in_override(value: Any) -> str:
    """A value in the grammar of overrides, whose keys have no quotes."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_in_override(one)}' for key, one in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_in_override, value))}]"
    if not isinstance(value, str):
        return json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
    is_plain = re.fullmatch(r"[A-Za-z_][\w./:-]*", value) and value.lower() not in (
        "null",
        "nan",
        "inf",
        *WORDS_OF_BOOL,
    )
    return value if is_plain else json.dumps(value, ensure_ascii=False)


def _takes(kind: Any, value: Any) -> bool:
    try:
        _adapter(kind).validate_python(value, strict=True)
    except ValidationError:
        return False
    return True


_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}  # in seconds
_TIME = r"(\d+)\s*(s|secs?|seconds?|m|mins?|minutes?|h|hrs?|hours?|d|days?)"


def _of_setting(hint: Any, value: Any, where: str) -> str:
    """For single settings."""
    answer = _ANSWERS.get(where)
    return "" if answer is None else answer(value, where)


def _as_max_steps(value: Any, where: str) -> str:
    return "For a part of an epoch set max_steps." if isinstance(value, float) and value > 0 else ""


def _as_schedule(value: Any, where: str) -> str:
    return "Write LazyCall(WarmupCosineLR)(...), with a schedule of trainwright.optim or torch."


def _as_warmup_steps(value: Any, where: str) -> str:
    return f"For a number of updates write warmup_steps={value!r}." if _takes(Count, value) else ""


def _as_eval_steps(value: Any, where: str) -> str:
    return f"Write eval_strategy='step', eval_steps={value!r}." if _takes(Count | _ShareOfSteps, value) else ""


def _as_stages(value: Any, where: str) -> str:
    layers = [value] if isinstance(value, str) else value
    if not layers or not _takes(FieldNames, layers):
        return _faulty_stage(where, value)
    return f"Write {_line(where, [{'epoch': 1, 'layers': layers}])}, with the epoch after which these are trained."


def _as_seconds(value: Any, where: str) -> str:
    time = re.fullmatch(_TIME, str(value), re.IGNORECASE)
    seconds = 0 if time is None else int(time[1]) * _UNITS[time[2][0].lower()]
    return f"Write {where}={seconds}, in seconds." if seconds else ""


def _as_rates(value: Any, where: str) -> str:
    if not isinstance(value, list | tuple | slice | Mapping):
        return ""
    return "For rates by depth set layer_decay=0.9; for others pass Trainer(..., optimizer=...) with groups."


def _as_warmup_of_average(value: Any, where: str) -> str:
    return "It is a number of updates, such as 2000." if isinstance(value, float) else ""


def _as_url(value: Any, where: str) -> str:
    if not (isinstance(value, str) and value[:1] in ("/", ".", "~")):
        return ""
    return f"Write {_line(where, 'file://' + os.path.abspath(os.path.expanduser(value)))}."


def _as_schedule_of_counts(value: Any, where: str) -> str:
    if not isinstance(value, Mapping) or 0 in (counts := _by_update(value)):
        return ""
    return f"The number from the first update on, that of key 0, is missing: write { ({0: 1} | counts)!r}."


def _faulty_stage(where: str, value: Any) -> str:
    """The part of the setting ``unfreeze`` that is wrong; "" for a value of another kind."""
    stages = [dict(value)] if isinstance(value, Mapping) else value
    if not isinstance(stages, list | tuple):
        return ""
    kinds = get_type_hints(Unfreeze, include_extras=True)
    kinds = {name: get_args(kind)[0] if get_origin(kind) is Required else kind for name, kind in kinds.items()}
    for number, stage in enumerate(stages):
        if not isinstance(stage, Mapping):
            return f"Item {number} is {stage!r}; it must be a dict."
        for key, part in stage.items():
            if key not in kinds:
                return f"Item {number} has no key {key!r}. {did_you_mean(str(key), list(kinds))}"
            if not _takes(kinds[key], part):
                names = _as_names(part) if key == "layers" else ""
                return f"Item {number} has {key}={part!r}; it must be {allowed_text(kinds[key], key)}{names}."
        if "layers" not in stage:
            return f"Item {number} lacks the key 'layers'."
    return f"Write {_line(where, stages)}, with brackets."


def _as_names(layers: Any) -> str:
    layers = [layers] if isinstance(layers, str | int) else layers
    is_meant = isinstance(layers, list | tuple) and layers and all(type(one) in (int, str) for one in layers)
    return f", {[str(one) for one in layers]!r}" if is_meant else ""


_ANSWERS: dict[str, Callable[[Any, str], str]] = {
    "num_epochs": _as_max_steps,
    "train.scheduler": _as_schedule,
    "warmup_ratio": _as_warmup_steps,
    "eval_strategy": _as_eval_steps,
    "learning_rate": _as_rates,
    **dict.fromkeys(("unfreeze", "train.unfreeze"), _as_stages),
    **dict.fromkeys(("max_time", "train.max_time", "hang_timeout_s", "train.dist.hang_timeout_s"), _as_seconds),
    **dict.fromkeys(("ema.warmup", "train.ema.warmup"), _as_warmup_of_average),
    **dict.fromkeys(("checkpoint_mirror", "train.checkpointer.mirror"), _as_url),
    **dict.fromkeys(("gradient_accumulation_steps", "train.num_accumulation_steps"), _as_schedule_of_counts),
}
_SUGGESTIONS = (_as_others, _of_setting, _as_one, _as_list, _as_number, _as_bool, _in_section, _nearest_word)


def _takes_bool(hint: Any) -> bool:
    return hint is bool or any(map(_takes_bool, get_args(hint)))


def allowed_text(hint: Any, name: str = "") -> str:
    """The allowed values of a type, as the end of the sentence "it must be ..."; a section is shown by an example."""
    if is_typeddict(hint.__origin__ if get_origin(hint) is Annotated else hint):
        return f"a section, for example {name}=dict({next(iter(get_type_hints(_section(hint))))}=...)"
    *others, last = _alternatives(hint)
    if not others:
        return last
    comma = "," if any(" " in text for text in others) else ""
    return f"{', '.join(others)}{comma} or {last}"


def _alternatives(hint: Any) -> list[str]:
    """What a type allows: the text of its :class:`Allowed`, or one text for each member of a union or a Literal."""
    if get_origin(hint) is Annotated:
        text = next((item.text for item in hint.__metadata__ if isinstance(item, Allowed)), None)
        return _alternatives(hint.__origin__) if text is None else [text]
    if get_origin(hint) is Literal:
        return [repr(value) for value in get_args(hint)]
    if hint in (bool, type(None)):
        return ["True", "False"] if hint is bool else ["None"]
    if is_typeddict(hint):
        *keys, last = get_type_hints(hint)
        return [f"a dict with some of the keys {', '.join(keys)} and {last}"]
    members = [text for member in get_args(hint) for text in _alternatives(member)]
    assert members, f"{hint} does not state what it allows"
    return members


def _section(hint: Any) -> Any:
    """The TypedDict among the alternatives of a type, or None."""
    hint = hint.__origin__ if get_origin(hint) is Annotated else hint
    return next((kind for kind in (hint, *get_args(hint)) if is_typeddict(kind)), None)


def _right_place(path: Sequence[str], fields: Mapping[str, Any]) -> str:
    """The section that has an unknown key, as a sentence; "" if there is none."""
    *above, name = path
    for group, hint in fields.items():
        section = _section(hint)
        if section is not None and name in get_type_hints(section) and name != "enabled":  # in many sections
            return f"Did you mean '{'.'.join([*above, group, name])}'?"
    return ""


_Finite = Annotated[float, Field(allow_inf_nan=False)]


_Name = Annotated[str, Field(min_length=1)]
_MAX_NAME = 255  # bytes of a file's name, on all usual file systems


def _check_path(path: str) -> str:
    """What no file system takes. The file system itself reports everything else."""
    parts = re.split(r"[/\\]" if os.name == "nt" else "/", path)
    if not path.strip() or "\0" in path or any(len(os.fsencode(part)) > _MAX_NAME for part in parts):
        raise ValueError
    return path


def _check_whole(value: float) -> float:
    """1e9 is a usual way to write "all of them", so a float with an integer value is accepted, and infinity."""
    if math.isfinite(value) and value != int(value):
        raise ValueError
    return value


def seconds_of(duration: str | float | timedelta) -> float:
    """A duration in seconds: a number of them, "HH:MM:SS" or "DD:HH:MM:SS".

    >>> seconds_of("01:30:00"), seconds_of("00:12:00:00"), seconds_of(90)
    (5400.0, 43200.0, 90.0)
    """
    if isinstance(duration, timedelta):
        seconds = duration.total_seconds()
    elif isinstance(duration, str):
        if re.fullmatch(r"(\d+:)?\d+:[0-5]?\d:[0-5]?\d", duration) is None:
            raise ValueError(duration)
        *days, hours, minutes, rest = map(int, duration.split(":"))
        seconds = float(sum(days) * 86400 + hours * 3600 + minutes * 60 + rest)
    else:
        seconds = float(duration)
    if not seconds > 0:
        raise ValueError(duration)
    return seconds


def _check_duration(value: Any) -> Any:
    if value is not None:
        seconds_of(value)
    return value


def _check_lazy(value: Any) -> Any:
    from trainwright.config.lazy.provenance import are_several  # here: loads omegaconf

    if value is None or (isinstance(value, str | int | float | list | dict) and not are_several(value)):
        raise PydanticCustomError("lazy_type", "neither a LazyCall nor an object")
    return value


def _check_lazies(value: Any) -> Any:
    for one in value if isinstance(value, list) else [value]:
        _check_lazy(one)
    return value


def _settings_of_bool(value: Any) -> Any:
    return ({} if value else None) if isinstance(value, bool) else value


def _as_whole(value: Any) -> Any:
    return int(value) if type(value) is float and value > 1 and value.is_integer() else value


_Whole = BeforeValidator(_as_whole)  # 1e4 is a usual way to write a count
Anything = Annotated[Any, Allowed("anything")]
Text = Annotated[str, Allowed("text")]
Words = Annotated[str, Field(pattern=r"\S"), Allowed("text that is not empty")]
Key = Annotated[_Name, Allowed("a name")]
FieldNames = Annotated[list[_Name], Field(min_length=1), Allowed("a list of names of fields")]
FieldName = Annotated[_Name, Allowed("the name of a field")]
Folder = Annotated[
    _Name,
    AfterValidator(_check_path),
    Allowed("a path, not empty, without the character NUL, and with at most 255 bytes between two slashes"),
]
Url = Annotated[
    str, Field(pattern=r"^[a-zA-Z][a-zA-Z0-9+.:_-]*://[^/\s]|^file:///"), Allowed("a URL such as 's3://bucket/run'")
]
Count = Annotated[int, Field(ge=1), _Whole, Allowed("a whole number >= 1")]
CountOrZero = Annotated[int, Field(ge=0), _Whole, Allowed("a whole number >= 0")]


def _by_update(value: Any) -> Any:
    """A schedule whose keys are numbers again: JSON has texts."""
    if not isinstance(value, Mapping):
        return value
    return {int(key) if isinstance(key, str) and key.isdecimal() else key: count for key, count in value.items()}


def _check_start(value: Any) -> Any:
    if isinstance(value, Mapping) and 0 not in value:
        raise ValueError("no number for the first update")
    return value


_ByUpdate = dict[Annotated[int, Field(ge=0)], Count]
CountByUpdate = Annotated[
    Count | _ByUpdate,
    BeforeValidator(_by_update),
    AfterValidator(_check_start),
    Allowed("a whole number >= 1, or a dict of these by the first update of each, such as {0: 1, 1000: 4}"),
]
Amount = Annotated[int | float, Field(ge=1), AfterValidator(_check_whole), Allowed("a whole number >= 1 (1e9 for all)")]
Workers = Annotated[int, Field(ge=-1), Allowed("a whole number >= 0, or -1")]
Seed = Annotated[int, Field(ge=0, lt=2**63), Allowed("a whole number in [0, 2**63)")]
Positive = Annotated[_Finite, Field(gt=0), Allowed("a number > 0")]
NotNegative = Annotated[_Finite, Field(ge=0), Allowed("a number >= 0")]
Ratio = Annotated[float, Field(ge=0, le=1), Allowed("a number in [0, 1]")]
RatioBelowOne = Annotated[float, Field(ge=0, lt=1), Allowed("a number in [0, 1)")]
RatioAboveZero = Annotated[float, Field(gt=0, le=1), Allowed("a number in (0, 1]")]
_ShareOfSteps = Annotated[float, Field(gt=0, le=1), Allowed("a fraction of the steps such as 0.5 or 1.0")]
_ShareOfBatches = Annotated[float, Field(gt=0, le=1), Allowed("a share of the batches such as 0.25 or 1.0")]
_ShareOfIterations = Annotated[float, Field(gt=0, le=1), Allowed("a share of all iterations such as 0.25")]
StepsOrFraction = Count | _ShareOfSteps | None
SaveSteps = CountOrZero | _ShareOfSteps | None
Batches = Count | _ShareOfBatches | None
Period = Count | _ShareOfIterations
Duration = Annotated[
    str | _Finite | None,
    AfterValidator(_check_duration),
    Allowed("a time such as '01:30:00' (hours, minutes, seconds) or '00:12:00:00' (from days), seconds > 0, or None"),
]
_NameWithArguments = Annotated[dict[str, Any], Allowed('{"name_": name, ...} with its arguments')]
Named = Annotated[str, Allowed("a name")] | _NameWithArguments
Arguments = Annotated[dict[str, Any], Allowed("a dict of arguments")]
Lazy = Annotated[Any, AfterValidator(_check_lazy), Allowed("a LazyCall, or an object")]
Lazies = Annotated[Any, AfterValidator(_check_lazies), Allowed("a LazyCall or an object, or a list or dict of these")]
LazyCalls = Annotated[list[Any], Allowed("a list of lazy calls, for example [LazyCall(Mine)(...)]")] | None
MatmulPrecision = Literal["highest", "high", "medium"] | None
PipelineSchedule = Literal["GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"]
Stages = Annotated[list[CountOrZero], Allowed("a list of whole numbers")] | None
ZeroStage = Annotated[int, Field(ge=0, le=3), Allowed("0, 1, 2 or 3")]
NonFinite = Literal["stop", "skip", "warn"]
LossIgnores = Annotated[
    Annotated[int, _Whole] | list[Annotated[int, _Whole]] | Literal["declared"] | None,
    Allowed("a class, a list of classes, None (samples count), or 'declared'"),
]
_TorchSchedule = Annotated[dict[str, Any], Allowed('{"name_": one of torch\'s, ...}')]
LRSchedulerKind = WarmupSchedule | _TorchSchedule | None
_TASKS: dict[str, Any] = {"type": "string", "enum": TaskType.words()}
Task = Annotated[str, Allowed("the name of a task"), WithJsonSchema(_TASKS)]


def _no_word(value: str) -> str:
    if value.lower() in ("true", "false") and not os.path.exists(value):
        raise PydanticCustomError("word", "a text for true or false")
    return value


Resume = Annotated[
    bool | Annotated[str, Field(min_length=1), AfterValidator(_no_word)] | None,
    Allowed("None, False, True (the newest checkpoint) or a path"),
]
Device = Annotated[str, Allowed("a device such as 'cpu' or 'cuda:0'")]


def trackers_of(value: Any) -> Any:
    """A tracker's name, a list of names, or a dict of their arguments: always as a dict of arguments by name."""
    if isinstance(value, str):
        return {value: {}}
    if isinstance(value, Sequence) and all(isinstance(name, str) for name in value):
        return {name: {} for name in value} or None
    if isinstance(value, Mapping):
        return {name: {} if arguments in (None, True) else arguments for name, arguments in value.items()} or None
    return None if value is False else value


class EarlyStopping(TypedDict, total=False):
    """When to stop before the last epoch."""

    monitor: Annotated[_Name, Allowed("the name of a value in the logs")]
    patience: CountOrZero
    mode: Literal["max", "min", "auto"]
    min_delta: NotNegative
    start: CountOrZero
    baseline: Annotated[_Finite, Allowed("a number")] | None


class ModelCheckpoint(TypedDict, total=False):
    """How often to save."""

    every_n_epoch: Count
    every_n_iteration: Count


class TensorBoard(TypedDict, total=False):
    """The folder of TensorBoard's event files."""

    log_dir: Folder | None
    comment: Text


_TrackerArguments = Annotated[dict[str, Any], Allowed("a dict of arguments, such as {'project': 'digits'}")]


class Trackers(TypedDict, total=False):
    """Experiment trackers, with the arguments of the function that begins a run of them."""

    wandb: _TrackerArguments
    mlflow: _TrackerArguments
    trackio: _TrackerArguments


class Profile(TypedDict, total=False):
    """Which iterations to profile, and what to record: the arguments of a ProfileHook."""

    wait: CountOrZero
    warmup: Count
    active: Count
    repeat: CountOrZero
    record_shapes: bool
    profile_memory: bool
    with_stack: bool
    with_flops: bool
    num_rows: CountOrZero
    all_ranks: bool


class Ema(TypedDict, total=False):
    """Which average of the weights is evaluated and saved."""

    decay: Annotated[float, Field(ge=0, lt=1), Allowed("a number in [0, 1), such as 0.999")]
    average: Literal["exponential", "equal"]
    warmup: Count | Literal["diffusers", "timm", "yolo"] | None
    gamma: Positive
    power: Positive
    start: CountOrZero | _ShareOfSteps
    every: Count | _ShareOfSteps
    buffers: bool


class Unfreeze(TypedDict, total=False):
    """Layers that are frozen until a step or an epoch is over."""

    layers: Required[Annotated[list[_Name], Field(min_length=1), Allowed("a list of names of layers")]]
    step: Count | _ShareOfSteps
    epoch: Annotated[int | float, Field(gt=0), Allowed("a number of epochs > 0")]


ModelCheckpointOrNone = Annotated[
    ModelCheckpoint | None, Allowed('{"every_n_epoch": n}, {"every_n_iteration": n} or None')
]
TrackersOrNone = Annotated[
    Trackers | None,
    BeforeValidator(trackers_of),
    Allowed("'wandb', 'mlflow' or 'trackio', a list of these, a dict of their arguments by name, or None"),
]
MetricDirections = Annotated[
    Words | list[Words] | dict[Words, Literal["max", "min"] | None] | None,
    Allowed("the name of a metric, a list of names, or names with 'max' or 'min' such as {'accuracy': 'max'}, or None"),
]
_YES = "True, False, {}"
ProfileOrNone = Annotated[
    Profile | None, BeforeValidator(_settings_of_bool), Allowed(_YES.format(allowed_text(Profile | None)))
]
EmaOrNone = Annotated[Ema | None, BeforeValidator(_settings_of_bool), Allowed(_YES.format(allowed_text(Ema | None)))]
UnfreezeOrNone = Annotated[list[Unfreeze], Allowed('a list such as [{"epoch": 1, "layers": ["encoder"]}]')] | None
