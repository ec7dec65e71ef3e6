"""A configuration that is always valid: all settings are checked together when it is created and at every change.

In YAML it is written as ``{category: {setting: value}}``; that and a flat ``{setting: value}`` are read.
"""

import copy
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from pydantic import ConfigDict, PrivateAttr

from trainwright.base.errors import ConfigError, ConfigKeyError, ConfigTypeError, Fault, did_you_mean
from trainwright.base.files import atomic_write, make_folders
from trainwright.base.notebook import summary
from trainwright.config.foreign_names import setting_hint
from trainwright.config.secrets import warn_of_hidden, without_secrets
from trainwright.config.torch_names import CUSTOM, GivenName
from trainwright.config.training.field_resolution import Draft
from trainwright.config.training.metric_config import read_only
from trainwright.config.training.row import CATEGORIES, Table, complete_early_stopping, fields_by_place
from trainwright.config.yaml_file import check_values, load_yaml, plain, to_text, with_format

_MOST_WORKERS = 8


def _resolve(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with the values that follow from others, from the machine or from defaults of dicts."""
    found = dict(settings)
    for name in ("output_dir", "init_weights_from", "resume_from_checkpoint"):
        if isinstance(found[name], str):
            found[name] = os.path.expanduser(found[name])
    if found["eval_batch_size"] is None:
        found["eval_batch_size"] = found["batch_size"]
    if found["dataloader_num_workers"] == -1:
        found["dataloader_num_workers"] = min(os.cpu_count() or 1, found["batch_size"], _MOST_WORKERS)
    found["early_stopping"] = complete_early_stopping(found["early_stopping"])
    if found["tensorboard"] is not None:
        found["tensorboard"] = {"log_dir": None, "comment": "", **found["tensorboard"]}
    if found["profile"] is not None:
        found["profile"] = {"wait": 10, "warmup": 2, "active": 3, "repeat": 1, **found["profile"]}
    return found


AnyPath = str | os.PathLike[str]

T = TypeVar("T", bound="CheckedConfig")


class _LoadFromYaml:
    """``load_from_yaml(path)``: called on a class it creates a configuration, called on an instance it changes it."""

    def __get__(self, config: T | None, kind: type[T]) -> Callable[[AnyPath], T]:
        def load_from_yaml(path: AnyPath) -> T:
            """Read settings from a YAML file, by category or flat; the others keep their values or defaults.

            A default value in the file counts as not set, because a saved file contains all settings.

            Raises:
                MissingFileError: the file does not exist.
                ConfigError: a setting is wrong; the message lists all faults.
            """
            draft = read_settings(path, kind)
            return _build(kind, draft, str(path)) if config is None else config._change_to(draft, str(path))

        return load_from_yaml


class CheckedConfig(Table):
    """Base of ``TrainingConfig``: a table of settings that checks them.

    Dicts and lists in it are read-only, so that every change is checked.
    """

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=(), ignored_types=(_LoadFromYaml,))

    _as_set: dict[str, Any] = PrivateAttr(default_factory=dict)  # by field, before _resolve
    _names: dict[str, str] = PrivateAttr(default_factory=dict)  # by field: the name that the user used

    def __init__(self, *unnamed: Any, **values: Any) -> None:
        if unnamed:
            kind, shown = type(self).__name__, ", ".join(map(repr, unnamed))
            hint = f" Write {kind}(**settings)." if isinstance(unnamed[0], Mapping) else ""
            hint = f" Write {kind}(output_dir={unnamed[0]!r})." if isinstance(unnamed[0], str | os.PathLike) else hint
            raise ConfigTypeError(f"{kind}: got {shown} without a name; each setting is given by its name.{hint}")
        self._apply(Draft(type(self), values))

    def update(self, values: Mapping[str, Any] | None = None, **more: Any) -> Self:
        """Change several settings at once; if a value is invalid, nothing changes. Returns itself.

        Raises:
            ConfigError: a setting is wrong; the message lists all faults.
        """
        return self._change_to(Draft(type(self), {**(values or {}), **more}))

    def copy_with(self, **changes: Any) -> Self:
        """A copy with some settings changed."""
        return copy.copy(self).update(changes)

    def is_set(self, name: str) -> bool:
        """Whether the user set the setting, by this or another of its names."""
        return self.field_of(name) in self.model_fields_set

    def name_of(self, field: str) -> str:
        """The name that the user used for a setting, if its values have the same form."""
        return self.shown_name(self._names, field)

    # Reading and writing as a dict.

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self, name, value)

    def keys(self) -> list[str]:
        """The names of the settings, without aliases."""
        return list(type(self).model_fields)

    def get(self, name: str, default: Any = None) -> Any:
        """A setting by any of its names; ``default`` if it does not exist."""
        return getattr(self, name) if name in self else default

    def __getitem__(self, name: str) -> Any:
        if name not in self:
            raise ConfigKeyError(f"{type(self).__name__}.{name}: no such setting. {self._near(name)}")
        return getattr(self, name)

    def __contains__(self, name: object) -> bool:
        return name in type(self).model_fields or name in self.aliases

    # Writing and reading files.

    load_from_yaml = _LoadFromYaml()

    def save_to_yaml(self, path: AnyPath) -> None:
        """Write all settings as ``{category: {setting: value}}``, with ``???`` for secrets.

        Raises:
            ConfigError: YAML cannot represent a value, such as a function.
        """
        settings = self.to_dict()
        check_values(type(self).__name__, settings, or_else=", or pass the object to the Trainer")
        content: dict[str, dict[str, Any]] = {category: {} for category in CATEGORIES}
        for name, value in settings.items():
            content[self.rows[name].category][name] = value
        shown, hidden = without_secrets({category: named for category, named in content.items() if named})
        names = ", ".join(name for name in settings if name in self.model_fields_set)
        atomic_write(path, with_format(f"{_SET} {names or 'nothing'}\n{to_text(shown)}").encode())
        warn_of_hidden(hidden, path)

    def save(self, folder: AnyPath, filename: str = "train_config.yaml", subfolder: AnyPath | None = None) -> Path:
        """Write the file into a folder, or its ``subfolder``, creating folders; returns the file."""
        path = Path(folder, subfolder or "", filename).expanduser()
        make_folders(path.parent)
        self.save_to_yaml(path)
        return path

    @classmethod
    def load(
        cls,
        path: AnyPath,
        filename: str = "train_config.yaml",
        subfolder: AnyPath | None = None,
        **overrides: Any,
    ) -> Self:
        """A configuration from a file, or from ``filename`` in a folder or its ``subfolder``. ``overrides`` come last.

        Raises:
            MissingFileError: the file does not exist.
            ConfigError: a setting is wrong; the message lists all faults.
        """
        file = Path(path, subfolder or "").expanduser()
        file = file / filename if file.is_dir() or subfolder is not None else file
        written = read_settings(file, cls)
        draft = Draft(cls, overrides, written.faults)
        draft.keep(written.given)
        return _build(cls, draft, str(file))

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any], **overrides: Any) -> Self:
        """A configuration from the result of :meth:`to_dict`. ``overrides`` come last."""
        return cls(**{**settings, **overrides})

    def to_dict(self) -> dict[str, Any]:
        """All settings as plain values: ``TrainingConfig(**config.to_dict())`` is equal to this configuration."""
        found: dict[str, Any] = plain(self._as_set)
        return {field: CUSTOM if isinstance(value, GivenName) else value for field, value in found.items()}

    @property
    def as_set(self) -> Mapping[str, Any]:
        """All settings as the user has set them, before values that follow from others replace them.

        Each change of a setting makes another mapping.
        """
        return self._as_set

    def to_json_string(self) -> str:
        """:meth:`to_dict` as JSON, with text for values that JSON cannot represent."""
        return json.dumps(self.to_dict(), indent=2, default=str)

    # Checks.

    def _apply(self, draft: Draft, source: str = "") -> None:
        draft.check_types(self._validated)
        draft.check_together()
        draft.raise_faults(source)
        self._as_set, self._names = draft.settings, draft.names
        self.__dict__.update(read_only(_resolve(draft.settings)))

    def _validated(self, given: dict[str, Any]) -> dict[str, Any]:
        super().__init__(**given)
        return dict(self.__dict__)

    def _change_to(self, draft: Draft, source: str = "") -> Self:
        """Change to the settings of a draft. If it has faults, nothing changes."""
        draft.keep(self._fields_given())
        other = _build(type(self), draft, source)
        self.__dict__.update(other.__dict__)
        self._as_set, self._names = other._as_set, {**self._names, **other._names}
        object.__setattr__(self, "__pydantic_fields_set__", other.model_fields_set)
        return self

    def _fields_given(self) -> dict[str, Any]:
        return {name: self._as_set[name] for name in self.model_fields_set}

    def _near(self, name: str) -> str:
        return setting_hint(name, {*type(self).model_fields, *self.aliases}, fields_by_place(type(self)))

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if (alias := type(self).aliases.get(name)) is not None:
                return alias.read(getattr(self, alias.field))
            if name.startswith("_"):
                return super().__getattr__(name)
            raise AttributeError(f"{type(self).__name__}.{name}: no such setting. {self._near(name)}")

        def __setattr__(self, name: str, value: Any) -> None:
            if name.startswith("_"):
                super().__setattr__(name, value)
            else:
                self.update({name: value})

    def summary(self) -> str:
        """The settings that differ from the defaults, by the names that the user used."""
        return self._text(self._values(self._changed(), self._names))

    def _changed(self) -> list[str]:
        """The fields that differ from their defaults."""
        fields = type(self).model_fields
        return [
            field
            for field, value in self._as_set.items()
            if fields[field].is_required() or value != fields[field].default
        ]

    def _values(self, fields: Iterable[str], names: Mapping[str, str]) -> dict[str, Any]:
        """The settings by the ``names`` of the fields, and in the form of these."""
        shown = {names.get(field, field): self._as_set[field] for field in fields}
        return {
            name: self.aliases[name].read(value) if name in self.aliases else value for name, value in shown.items()
        }

    def _text(self, values: Mapping[str, Any]) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in values.items())})"

    def _repr_html_(self) -> str:  # what a notebook shows
        shown, _ = without_secrets(self._values(self._changed(), self._names))
        others = len(type(self).model_fields) - len(shown)
        note = f"<div><i>{others} other settings have their defaults; get_config_help() describes all.</i></div>"
        return summary(type(self).__name__, {name: repr(value) for name, value in shown.items()}, note)

    def __repr__(self) -> str:
        return self._text(self._values(self._changed(), {}))

    def __str__(self) -> str:
        return repr(self)

    def __eq__(self, other: object) -> bool:
        """Whether all settings have equal values."""
        if type(other) is not type(self):
            return NotImplemented
        return all(self.__dict__[name] == other.__dict__[name] for name in type(self).model_fields)

    __hash__ = None  # type: ignore[assignment]  # it can be changed

    def __reduce__(self) -> Any:  # for copies and for processes that read data
        return partial(type(self), **self._fields_given()), ()

    def __copy__(self, memo: Any = None) -> Self:
        return type(self)(**self._fields_given())  # a check copies dicts and lists

    __deepcopy__ = __copy__

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """pydantic's name of :meth:`copy_with`."""
        return self.copy_with(**(update or {}))


def _build(kind: type[T], draft: Draft, source: str = "") -> T:
    config = kind.__new__(kind)
    config._apply(draft, source)
    return config


_SET = "# Set by the user:"  # the first line of a saved file, which has all settings


def read_settings(path: AnyPath, kind: type[CheckedConfig]) -> Draft:
    """The settings in a file, and the faults of their names and categories.

    Raises:
        MissingFileError: the file does not exist.
        ConfigError: the file is not valid, or a value is ``???``.
    """
    values: dict[str, Any] = {}
    faults = []
    known = {*kind.model_fields, *kind.aliases}
    for category, name, value in _entries(_content(path), known):
        where = name if category is None else f"{category}.{name}"
        if name not in known and "." in name:
            hint = setting_hint(name, known, fields_by_place(kind), sign=": ")
            faults.append(Fault(where, f"no such setting. {hint}", ConfigKeyError))
            continue
        if name not in known and (category is not None or isinstance(value, Mapping)):
            what = "no such setting" if category is not None else "no such category or setting"
            hint = did_you_mean(name, known if category else {*CATEGORIES, *known})
            faults.append(Fault(where, f"{what}. {hint}", ConfigKeyError))
            continue
        right = kind.rows[kind.field_of(name)].category if name in known else None
        if category is not None and category != right:
            faults.append(Fault(where, f"{name} is not in this category. Did you mean '{right}.{name}'?"))
        if name in values and values[name] != value:
            text = f"got {value!r}, and elsewhere in the file {values[name]!r}. Give one of them."
            faults.append(Fault(where, text))
        values[name] = value
    draft = Draft(kind, values, faults)
    first, _, _ = Path(path).read_text(encoding="utf-8").partition("\n")
    if first.startswith(_SET):
        draft.forget_defaults(first.removeprefix(_SET).replace(",", " ").split())
    return draft


def _entries(content: Mapping[Any, Any], known: set[str]) -> Iterator[tuple[str | None, str, Any]]:
    """``(category, name, value)``; the category is None at the top level."""
    for key, value in content.items():
        name = str(key)
        if name not in CATEGORIES or (name in known and not isinstance(value, Mapping)):
            yield None, name, value
        elif isinstance(value, Mapping):
            for inner, item in value.items():
                yield name, str(inner), item
        elif value is not None:
            raise ConfigError(f"{name}: got {value!r}; a category holds settings, as {name}: {{setting: value}}.")


def _content(path: str | os.PathLike[str]) -> dict[Any, Any]:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    cfg = load_yaml(path)  # reads 5e-5 as a number
    try:
        content = OmegaConf.to_container(cfg, resolve=True)
        missing = sorted(OmegaConf.missing_keys(cfg))
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {str(error).splitlines()[0]}") from error
    if missing:
        names = [key.partition(".")[2] if key.partition(".")[0] in CATEGORIES else key for key in missing]
        raise ConfigError(
            f"{path}: {', '.join(names)}: no value yet (it is '???', as secrets are in saved files)."
            " Write the value into the file, or create the configuration in Python."
        )
    assert isinstance(content, dict), "load_yaml gives a mapping"
    return content
