"""A row of the table of settings: all that is known of a setting beside its name and its type."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, ClassVar, Literal, cast

from pydantic import BaseModel, Field

from trainwright.config.torch_names import MISSPELLED, WARMUP_SCHEDULES
from trainwright.config.training.metric_config import MetricConfig
from trainwright.config.yaml_file import plain

UNSPECIFIED = object()  # the value of an alias that does not determine its field
UNCHANGED: Any = object()  # a column whose value is that of the setting itself
# The headings under which a YAML file, the help and the reference page show the settings.
CATEGORIES = ("train", "learning", "metrics", "logging", "checkpoint", "callback", "device")


Changed = Literal["train", "build"] | Callable[[Any], Any]


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True, slots=True)
class Alias:
    """Another name of ``field``, whose value may have another form."""

    field: str = ""
    read: Callable[[Any], Any] = _same  # the value of the field as that of the alias
    write: Callable[[Any], Any] = _same  # the inverse, or UNSPECIFIED. Raises ValueError with the allowed values.
    accepts: Callable[[Any], bool] = lambda value: True  # of the field, if the alias does not determine it
    note: str = ""  # how the two differ, for the reference

    @property
    def is_plain(self) -> bool:
        """Whether the values have the same form."""
        return self.write is _same


@dataclass(frozen=True, slots=True)
class Row:
    """The columns of a setting.

    Attributes:
        trainer: the default of ``TrainerConfig``.
        place: the key of the setting in a config file.
        counterpart: the key of a config file that has the setting in another form, if it has no place.
        file: the value in runs of config files, for a setting without a place; by default as in ``TrainingConfig``.
        names: aliases, among them those of other libraries.
        others: aliases whose values have another form.
        words: other spellings of values.
        read: gives a value in plain types; raises ValueError with the allowed values.
        dev_run: the value in a ``fast_dev_run``, or a function of its number of batches.
        copy: the value in the copy of a run that a check trains.
        resumed: what a resumed run uses if the value differs from that of its checkpoint: "now": the new one; with
            "optimizer" and "lr_scheduler" the state of these keeps the old one; "": it is not compared, because it
            changes no result, or is why one resumes, as the length of the run.
        changed: when a value is used that is set after the trainer was built: "train": with the next ``train()``;
            "build": never, so ``train()`` refuses it; a function: its result for a value is what ``train()`` refuses to
            find changed.
    """

    category: str
    trainer: Any = UNCHANGED
    place: str = ""
    counterpart: str = ""
    file: Any = UNCHANGED
    names: str = ""
    others: Mapping[str, Alias] = field(default_factory=dict)
    words: Mapping[Any, Any] = field(default_factory=dict)
    read: Callable[[Any], Any] = plain
    dev_run: Any = UNCHANGED
    copy: Any = UNCHANGED
    resumed: str = UNCHANGED
    changed: Changed = "build"

    @property
    def source(self) -> str:
        """``resumed``; by default as the category says."""
        if self.resumed is UNCHANGED:
            return "" if self.category in ("logging", "checkpoint", "device") else "now"
        return self.resumed

    def __call__(self, schema: dict[str, Any]) -> None:
        """Add the category to the JSON schema of the setting; pydantic calls what it keeps with a field."""
        schema["category"] = self.category

    def canonical(self, value: Any) -> Any:
        """A value in plain types and in its canonical spelling."""
        value = self.read(value)
        for word, meaning in self.words.items():
            if type(value) is type(word) and value == word:
                return meaning
        return value


def setting(default: Any, category: str, help: str, **columns: Any) -> Any:
    """A field of a configuration, with the columns of its :class:`Row`; ``...`` for a required one."""
    assert category in CATEGORIES
    return Field(default, description=help, json_schema_extra=Row(category, **columns))


class Table(BaseModel):
    """A model whose fields are made by :func:`setting`.

    Attributes:
        rows: the row of each field.
        aliases: those of all fields, by name.
    """

    rows: ClassVar[dict[str, Row]] = {}
    aliases: ClassVar[dict[str, Alias]] = {}

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        cls.rows = {name: cast(Row, info.json_schema_extra) for name, info in cls.model_fields.items()}
        cls.aliases = {}
        for name, row in cls.rows.items():
            cls.aliases |= dict.fromkeys(row.names.split(), Alias(name))
            cls.aliases |= {other: replace(alias, field=name) for other, alias in row.others.items()}

    @classmethod
    def field_of(cls, name: str) -> str:
        """The field that has this name or alias."""
        return cls.aliases[name].field if name in cls.aliases else name

    @classmethod
    def shown_name(cls, names: Mapping[str, str], field: str) -> str:
        """A field's name among ``names``, by which the user set them, if the values of both have the same form."""
        name = names.get(field, field)
        return name if name == field or cls.aliases[name].is_plain else field


def fields_by_place(kind: type[Table]) -> dict[str, str]:
    """The fields by their keys in config files."""
    return {row.place: name for name, row in kind.rows.items() if row.place}


# What columns have in common.


def is_on(value: Any) -> bool:
    """A value that has to be True or False."""
    if not isinstance(value, bool):
        raise ValueError("True or False")
    return value


def is_off(value: Any) -> bool:
    """The opposite of such a value."""
    return not is_on(value)


def read_name(value: Any) -> Any:
    """A name, or a dict of a name and arguments, with the name spelled right."""
    value = plain(value)
    if isinstance(value, dict) and "name_" in value:
        return {**value, "name_": read_name(value["name_"])}
    return MISSPELLED.get(value, value) if isinstance(value, str) else value


def read_schedule(value: Any) -> Any:
    """:func:`read_name`; a warm-up schedule that has no arguments is its name."""
    value = read_name(value)
    is_alone = isinstance(value, dict) and [*value] == ["name_"] and value["name_"] in WARMUP_SCHEDULES
    return value["name_"] if is_alone else value


def read_time(value: Any) -> Any:
    """A timedelta, or the dict of its arguments, as seconds."""
    if isinstance(value, Mapping):
        try:
            value = timedelta(**{str(unit): amount for unit, amount in value.items()})
        except TypeError as error:
            raise ValueError("a timedelta, or its arguments, such as {'hours': 12}") from error
    return value.total_seconds() if isinstance(value, timedelta) else plain(value)


def complete_early_stopping(settings: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The settings of early stopping with the defaults of those that the user has not set."""
    if not isinstance(settings, Mapping):  # None, or a value that is refused
        return settings
    # The better direction depends on the monitor: "auto" derives it from the name that the user sets.
    mode = "auto" if "monitor" in settings else "max"
    return {"monitor": "eval_epoch_metric", "patience": 4, "mode": mode, **settings}


def read_metrics(value: Any) -> Any:
    """A list of names and MetricConfigs."""
    if not isinstance(value, list | tuple):
        return plain(value)
    return [
        MetricConfig(**{str(key): setting for key, setting in item.items()})
        if isinstance(item, Mapping)
        else item
        if isinstance(item, MetricConfig)
        else plain(item)
        for item in value
    ]


def periods_of_epochs(count: Any) -> dict[str, Any] | None:
    """The ``model_checkpoint`` of each ``count`` epochs."""
    if not isinstance(count, int) or isinstance(count, bool) or count < 0:
        raise ValueError("a whole number >= 0")
    return {"every_n_epoch": count} if count else None
