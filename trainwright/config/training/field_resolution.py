"""Resolution of settings: names and aliases are mapped to fields, values are checked, and faults are collected."""

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any

from pydantic import ValidationError

from trainwright.base.deprecation import warn_of_setting
from trainwright.base.errors import ConfigError, ConfigKeyError, Fault, error_of, got
from trainwright.config import rules
from trainwright.config.foreign_names import setting_hint, value_hint
from trainwright.config.named_settings import NamedSettings
from trainwright.config.torch_names import (
    GivenName,
    described_loss,
    find_torch_class,
    with_lists,
)
from trainwright.config.training.row import UNSPECIFIED, Alias, Table, fields_by_place
from trainwright.config.validation import faults_of


class Draft:
    """A configuration that is not checked yet: the values that the user set, by field, and their faults so far.

    ``values`` are settings by any of their names.
    """

    def __init__(self, kind: type[Table], values: Mapping[str, Any], faults: Iterable[Fault] = ()) -> None:
        self.kind = kind
        self.given: dict[str, Any] = {}  # by field, in canonical spelling
        self.settings: dict[str, Any] = {}  # of all fields; complete after check_types
        self.faults = list(faults)
        self._name_of: dict[str, str] = {}  # the name that the user used
        self._unspecified: list[Alias] = []
        self._refused: set[str] = set()
        known = {*kind.model_fields, *kind.aliases}
        for name in sorted(values, key=self._rank):
            if name in known:
                self._set(name, values[name])
            else:
                hint = setting_hint(str(name), known, fields_by_place(kind))
                self.faults.append(Fault(f"{kind.__name__}.{name}", f"no such setting. {hint}", ConfigKeyError))

    def refuse(self, field: str, text: str, kind: type[ConfigError] = ConfigError) -> None:
        """Add a fault of a field."""
        self.faults.append(Fault(f"{self.kind.__name__}.{self._name_of.get(field, field)}", text, kind))
        self._refused.add(field.partition(".")[0])

    @property
    def names(self) -> dict[str, str]:
        """The name that the user used, by field."""
        return {field: name for field, name in self._name_of.items() if field in self.given}

    def forget_defaults(self, is_set: Collection[str]) -> None:
        """Treat default values of other fields than these as not set."""
        for field, value in list(self.given.items()):
            default = _default(self.kind, field)
            if field not in is_set and type(value) is type(default) and value == default:
                del self.given[field]

    def keep(self, others: Mapping[str, Any]) -> None:
        """Set the fields that the user did not set."""
        excluded = {s.field for s in self._unspecified if s.field in others and not s.accepts(others[s.field])}
        kept = {field: value for field, value in others.items() if field not in self._name_of and field not in excluded}
        self.given = {**kept, **self.given}

    def check_types(self, validate: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        """Validate each value with pydantic."""
        try:
            names = {field: value for field, value in self.given.items() if isinstance(value, GivenName)}
            self.settings = validate(self.given) | names  # pydantic converts them to str
        except ValidationError as error:
            for fault in faults_of(error, self.kind, self.given):
                text = _place_of(fault.path, self.given.get(fault.path)) or fault.text
                self.refuse(fault.path, text, fault.kind)
            self.settings = {name: self.given.get(name, _default(self.kind, name)) for name in self.kind.model_fields}

    def check_together(self) -> None:
        """Resolve and check fields that depend on each other, if they have no fault of their own."""
        for fields, resolve in _RESOLVED:
            if not self._refused.intersection(fields):
                resolve(self)
        shown_name = partial(self.kind.shown_name, self._name_of)
        settings = NamedSettings("Python", self.settings, shown_name, self.given.__contains__)
        for field, text in rules.faults(settings, self._refused):
            self.refuse(field, text)

    def raise_faults(self, source: str = "") -> None:
        """Raise one error with all faults, if there are any."""
        if self.faults:
            lines = (f"{source}: {fault}" if source else str(fault) for fault in self.faults)
            raise error_of(self.faults, "\n".join(lines))

    def _set(self, name: str, value: Any) -> None:
        field, alias = self.kind.field_of(name), self.kind.aliases.get(name)
        warn_of_setting(name, field)
        try:
            converted = alias.write(value) if alias else value
            if field == "loss" and callable(converted):
                converted = _written_loss(converted)
            elif field == "loss" and isinstance(converted, Mapping):
                converted = with_lists(converted)
            if converted is not UNSPECIFIED:
                converted = self.kind.rows[field].canonical(converted)
        except ValueError as error:
            self._name_of[field] = name
            is_complete = isinstance(error, ConfigError)  # a complete message of a metric's config
            text = str(error) if is_complete else f"{got(value)}; it must be {error}."
            self.refuse(field, _place_of(field, value) or text)
            return
        if field in self.given and not self._agree(field, alias, converted):
            earlier = self._name_of[field]
            named = self.kind.aliases.get(earlier)
            other = self.given[field] if named is None else named.read(self.given[field])
            self._name_of[field] = name
            self.refuse(
                field, f"got {value!r}, and {earlier}={other!r}: these are two names of one setting. Give one of them."
            )
        elif converted is UNSPECIFIED and alias:
            self._unspecified.append(alias)
        elif field not in self.given:
            self.given[field] = converted
            self._name_of[field] = name

    def _rank(self, name: str) -> int:
        """Fields first, then plain aliases, then aliases whose values have another form."""
        alias = self.kind.aliases.get(name)
        return 0 if alias is None else 1 if alias.is_plain else 2

    def _agree(self, field: str, alias: Alias | None, converted: Any) -> bool:
        given = self.given[field]
        if alias is None:
            return bool(given == converted)
        return alias.accepts(given) if converted is UNSPECIFIED else bool(alias.read(given) == alias.read(converted))


def _written_loss(loss: Any) -> dict[str, Any]:
    written = described_loss(loss)
    if written is None:
        name = getattr(loss, "__name__", type(loss).__name__)
        raise ValueError(f"a loss of torch.nn; pass your own {name} to the trainer: Trainer(..., loss=...)")
    return written


def _place_of(field: str, value: Any) -> str:
    """Where a value belongs that is none of this field, as the text of an error; "" if that is not known."""
    if field == "lr_scheduler_type" and isinstance(value, str):
        found, _ = find_torch_class("lr_scheduler", value)
        if found is not None:
            line = f"Write lr_scheduler={{'name_': {found.__name__!r}, ...}}."
            return f"got {value!r}, a schedule of torch. {value_hint(field, value) or line}"
    elif field in ("optimizer", "lr_scheduler") and hasattr(value, "step"):
        if not isinstance(value, type):
            return f"got an object of {type(value).__name__}; pass it to the trainer: Trainer(..., {field}=...)."
        name = value.__name__
        return f"got the class {name}; give its name, {name!r}, or {{'name_': {name!r}, ...}} with its arguments."
    elif field == "loss" and isinstance(value, type):
        name = value.__name__
        if find_torch_class("loss", name)[0] is value:
            return f"got the class {name}; give its name, {name!r}, or an object with its arguments, {name}(...)."
        return f"got the class {name}; pass an object of it to the trainer: Trainer(..., loss={name}(...))."
    elif field == "lr_scheduler_type" and callable(value):
        line = "lr_scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, function)"
        return f"{got(value)}; pass a schedule to the trainer: Trainer(..., optimizer=optimizer, {line})."
    return ""


def _default(kind: type[Table], field: str) -> Any:
    info = kind.model_fields[field]
    return None if info.is_required() else info.get_default(call_default_factory=True)


_INSIDE_OPTIMIZER = {"learning_rate": "lr", "weight_decay": "weight_decay"}


def _resolve_rates(draft: Draft) -> None:
    """The rates among the arguments of the optimizer are the settings of the same names."""
    arguments = draft.settings["optimizer"]
    for field, name in _INSIDE_OPTIMIZER.items():
        if not isinstance(arguments, dict) or arguments.get(name) is None:
            continue
        inner = arguments[name]
        if field in draft.given and draft.given[field] != inner:
            draft.refuse(
                field,
                f"got {draft.given[field]!r}, but optimizer has {name}={inner!r}: these are two names of one setting."
                " Give one of them.",
            )
        elif isinstance(inner, bool) or not isinstance(inner, int | float) or not inner >= 0:
            draft.refuse("optimizer", f"got {name}={inner!r}; it must be a number >= 0.")
        else:
            draft.settings[field] = inner


def _resolve_schedule(draft: Draft) -> None:
    """A schedule of torch replaces the default warm-up schedule, but not one that the user set."""
    if draft.settings["lr_scheduler"] is None:
        return
    kind = draft.settings["lr_scheduler_type"]
    if "lr_scheduler_type" in draft.given and kind is not None:
        draft.refuse(
            "lr_scheduler",
            f"got {draft.settings['lr_scheduler']!r}, and lr_scheduler_type={kind!r}: there can be one schedule. Give"
            " one of them.",
        )
    draft.settings["lr_scheduler_type"] = None


_RESOLVED: tuple[tuple[tuple[str, ...], Callable[[Draft], None]], ...] = (
    (("learning_rate", "weight_decay", "optimizer"), _resolve_rates),
    (("lr_scheduler", "lr_scheduler_type"), _resolve_schedule),
)
