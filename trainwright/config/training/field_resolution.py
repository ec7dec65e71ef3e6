"""Resolution of settings: names and aliases are mapped to fields, and faults are collected."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, get_type_hints

from pydantic import BaseModel, ValidationError

from trainwright.config.errors import ConfigError, ConfigKeyError, did_you_mean
from trainwright.config.training.aliases import FOREIGN, NO_OPINION, SYNONYMS, Synonym, canonical, field_of
from trainwright.config.training.types import PARTS, Allowed, allowed_text


class Draft:
    """The values that the user set, by field, and every fault found in them so far.

    Args:
        kind: the class that is to be made.
        values: settings by any of their names.
        faults: what was wrong before the settings were looked at.

    Attributes:
        given: the settings by field, in the fields' own words.
        settings: every field's value, given or default; complete after :meth:`check_types`.
    """

    def __init__(self, kind: type[BaseModel], values: Mapping[str, Any], faults: Iterable[str] = ()) -> None:
        self.kind = kind
        self.given: dict[str, Any] = {}
        self.settings: dict[str, Any] = {}
        self.faults = list(faults)
        self._has_only_unknown_names = not self.faults
        self._said: dict[str, str] = {}  # the name that the user used
        self._without_opinion: list[Synonym] = []
        self._refused: set[str] = set()
        known = {*kind.model_fields, *SYNONYMS}
        for name in sorted(values, key=_rank):
            if name in known:
                self._take(name, values[name])
            else:
                hint = f"Here: {FOREIGN[name]}." if name in FOREIGN else did_you_mean(str(name), known)
                self.faults.append(f"{kind.__name__}.{name}: no such setting. {hint}")

    def refuse(self, field: str, text: str) -> None:
        """Add a fault of a field."""
        self.faults.append(f"{self.kind.__name__}.{self._said.get(field, field)}: {text}")
        self._refused.add(field.partition(".")[0])
        self._has_only_unknown_names = False

    @property
    def names(self) -> dict[str, str]:
        """The name that the user used, by field."""
        return {field: name for field, name in self._said.items() if field in self.given}

    def is_given(self, field: str) -> bool:
        """Whether the user set the field."""
        return field in self.given

    def forget_defaults(self) -> None:
        """Treat default values as not set: a file that holds every setting sets most of them to their defaults."""
        for field, value in list(self.given.items()):
            default = _default(self.kind, field)
            if type(value) is type(default) and value == default:
                del self.given[field]

    def keep(self, others: Mapping[str, Any]) -> None:
        """Set fields to these values unless the user has set them to others."""
        against = {s.field for s in self._without_opinion if s.field in others and not s.admits(others[s.field])}
        kept = {field: value for field, value in others.items() if field not in self._said and field not in against}
        self.given = {**kept, **self.given}

    def check_types(self, validate: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        """Validate each value with pydantic."""
        try:
            self.settings = validate(self.given)
        except ValidationError as error:
            self._refuse_types(error)
            self.settings = {name: self.given.get(name, _default(self.kind, name)) for name in self.kind.model_fields}

    def check_together(self, checks: Iterable[tuple[tuple[str, ...], Callable[["Draft"], None]]]) -> None:
        """Apply each check whose fields have no fault of their own."""
        for fields, check in checks:
            if not self._refused.intersection(fields):
                check(self)

    def raise_faults(self, source: str = "") -> None:
        """Raise one error with all faults, if there are any.

        Raises:
            ConfigError: a ConfigKeyError if every fault is an unknown name.
        """
        if self.faults:
            kind = ConfigKeyError if self._has_only_unknown_names else ConfigError
            raise kind("\n".join(f"{source}: {fault}" if source else fault for fault in self.faults))

    def _take(self, name: str, value: Any) -> None:
        field, synonym = field_of(name), SYNONYMS.get(name)
        try:
            written = synonym.write(value) if synonym else value
            meant = written if written is NO_OPINION else canonical(field, written)
        except ValueError as error:
            self._said[field] = name
            is_complete = isinstance(error, ConfigError)  # a complete message of a metric's config
            self.refuse(field, str(error) if is_complete else f"got {_shown(value)}; it must be {error}.")
            return
        if field in self.given and not self._agree(field, synonym, meant):
            was = self._said[field]
            other = SYNONYMS[was].read(self.given[field]) if was in SYNONYMS else self.given[field]
            self._said[field] = name
            self.refuse(
                field, f"got {value!r}, and {was}={other!r}: these are two names of one setting. Give one of them."
            )
        elif meant is NO_OPINION and synonym:
            self._without_opinion.append(synonym)
        elif field not in self.given:
            self.given[field] = meant
            self._said[field] = name

    def _agree(self, field: str, synonym: Synonym | None, meant: Any) -> bool:
        given = self.given[field]
        if synonym is None:
            return bool(given == meant)
        return synonym.admits(given) if meant is NO_OPINION else bool(synonym.read(given) == synonym.read(meant))

    def _refuse_types(self, error: ValidationError) -> None:
        seen = set()
        for entry in error.errors(include_url=False):
            field = str(entry["loc"][0])
            key = str(entry["loc"][1]) if field in PARTS and len(entry["loc"]) > 1 else None
            where = field if key is None else f"{field}.{key}"
            if where in seen:  # one sentence for a field, though pydantic has one for each alternative of its type
                continue
            seen.add(where)
            info = self.kind.model_fields[field]
            if entry["type"] == "missing":
                self.refuse(where, f"missing; give {allowed_text(info)}.")
            elif entry["type"] == "extra_forbidden":
                self.refuse(where, f"no such key. {did_you_mean(str(key), get_type_hints(PARTS[field]))}")
            else:
                allowed = allowed_text(info) if key is None else _allowed_of_part(field, key)
                value = self.given[field] if key is None else self.given[field][key]
                self.refuse(where, f"got {_shown(value)}; it must be {allowed}.")


def _rank(name: str) -> int:
    """The fields' own names first, and what shows them in another form last."""
    return 0 if name not in SYNONYMS else 1 if SYNONYMS[name].is_plain else 2


def _default(kind: type[BaseModel], field: str) -> Any:
    info = kind.model_fields[field]
    return None if info.is_required() else info.get_default(call_default_factory=True)


def _allowed_of_part(field: str, key: str) -> str:
    hint = get_type_hints(PARTS[field], include_extras=True)[key]
    return next(item.text for item in hint.__metadata__ if isinstance(item, Allowed))


def _shown(value: Any) -> str:
    return f"{value!r} ({type(value).__name__})"
