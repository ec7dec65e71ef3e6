"""A dataclass of settings that is stored in a YAML file: the base of model and data configs."""

import copy
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Self

from trainwright.base.errors import ConfigError, ConfigKeyError, ConfigTypeError, did_you_mean, got
from trainwright.base.files import atomic_write, make_folders
from trainwright.base.notebook import summary
from trainwright.config.secrets import without_secrets
from trainwright.config.yaml_file import check_values, plain, read_mapping, to_text

_MARKS = ("name", "config_type")  # identify the kind of file; not fields


@dataclass
class YamlConfig:
    """Base of a config dataclass. Its file holds ``name`` (the class that it configures) and ``config_type``.

    A field set to None takes its default. A list becomes a tuple, and an int a float, if the default has that type.

    Class attributes:
        name: the registered name of the class that it configures.
        filename: the default name of its file.
        ignored_keys: keys of older files that are ignored.

    Raises:
        ConfigTypeError: a value does not have its default's type; the message lists all of them.
    """

    name: ClassVar[str] = ""
    config_type: ClassVar[str] = ""
    filename: ClassVar[str] = "config.yaml"
    ignored_keys: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        faults = [fault for field in fields(self) if (fault := self._apply_default(field))]
        if faults:
            raise ConfigTypeError("\n".join(faults))

    @classmethod
    def from_dict(cls, content: Mapping[str, Any], *, source: str = "", **overrides: Any) -> Self:
        """A config of the fields in ``content``; ``overrides`` win.

        Raises:
            ConfigKeyError: a key is not a field; the message lists all of them with the nearest field.
            ConfigError: ``content`` belongs to another class.
        """
        where = source or cls.__name__
        for mark in _MARKS:
            own, theirs = getattr(cls, mark), content.get(mark)
            if theirs is not None and own and theirs != own:
                raise ConfigError(f"{where}: {mark} is {theirs!r}; {cls.__name__} is for {own!r}.")
        known = {key: value for key, value in content.items() if key not in cls.ignored_keys | set(_MARKS)}
        cls._check_keys([*known, *overrides], where)
        return cls(**{**copy.deepcopy(known), **overrides})

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        filename: str | None = None,
        subfolder: str | os.PathLike[str] | None = None,
        **overrides: Any,
    ) -> Self:
        """The config in ``path``, a YAML file or the folder of one, or in ``subfolder`` of that folder.

        Raises:
            MissingFileError: there is no such file. ConfigError, ConfigKeyError, ConfigTypeError: as `from_dict`.
        """
        file = Path(path, subfolder or "").expanduser()
        if file.is_dir() or filename is not None or subfolder is not None:
            file = file / (filename or cls.default_filename())
        return cls.from_dict(read_mapping(file), source=str(file), **overrides)

    def save(
        self,
        path: str | os.PathLike[str],
        filename: str | None = None,
        subfolder: str | os.PathLike[str] | None = None,
    ) -> Path:
        """Write the YAML file into the folder ``path``, or its ``subfolder``, creating folders; returns the file."""
        file = Path(path, subfolder or "", filename or self.default_filename()).expanduser()
        make_folders(file.parent)
        atomic_write(file, self.to_yaml().encode())
        return file

    @classmethod
    def default_filename(cls) -> str:
        """The default name of the file."""
        return cls.filename

    def to_yaml(self) -> str:
        """The text of the file.

        Raises:
            ConfigTypeError: YAML cannot represent a value.
        """
        content = {mark: value for mark in _MARKS if (value := getattr(self, mark))} | plain(self.to_dict())
        check_values(type(self).__name__, content)
        return to_text(content)

    def to_dict(self) -> dict[str, Any]:
        """The fields and their values, copied."""
        return {field.name: copy.deepcopy(getattr(self, field.name)) for field in fields(self)}

    def update(self, values: Mapping[str, Any] | None = None, **more: Any) -> Self:
        """Set several fields; if a value is invalid, nothing changes. Returns the config itself."""
        changes = {**(values or {}), **more}
        self._check_keys(list(changes), type(self).__name__)
        now = {field.name: getattr(self, field.name) for field in fields(self) if field.init}
        self.__dict__.update(vars(type(self)(**{**now, **changes})))
        return self

    def _repr_html_(self) -> str:  # what a notebook shows
        shown, _ = without_secrets(plain(self.to_dict()))
        return summary(type(self).__name__, {name: repr(value) for name, value in shown.items()})

    def keys(self) -> list[str]:
        """The names of the fields."""
        return [field.name for field in fields(self)]

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a field; ``default`` if there is no such field."""
        return getattr(self, key) if key in self.keys() else default

    def __getitem__(self, key: str) -> Any:
        self._check_keys([key], type(self).__name__)
        return getattr(self, key)

    def __contains__(self, key: object) -> bool:
        return key in self.keys()

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    @classmethod
    def _check_keys(cls, keys: list[Any], where: str) -> None:
        allowed = [field.name for field in fields(cls) if field.init]
        faults = [f"{where}: no such key: {k}. {did_you_mean(str(k), allowed)}" for k in keys if k not in allowed]
        if faults:
            raise ConfigKeyError("\n".join(faults))

    def _apply_default(self, field: "Field[Any]") -> str | None:
        """Replace None by the default and convert to the default's type; returns an error message, or None."""
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        value = getattr(self, field.name)
        if default is MISSING or default is None:
            return None
        if value is None:
            value = default
        elif isinstance(default, tuple) and isinstance(value, list):
            value = tuple(value)
        elif type(default) is float and type(value) is int:
            value = float(value)
        setattr(self, field.name, value)
        if type(default) not in (bool, int, float, str, tuple):
            return None
        # A bool is an int in Python, but no number here.
        if isinstance(value, type(default)) and isinstance(value, bool) == isinstance(default, bool):
            return None
        return f"{type(self).__name__}.{field.name}: {got(value)}; it must be of type {type(default).__name__}."


def check_positive(config: YamlConfig, *names: str, or_none: bool = False) -> None:
    """Raise ConfigError unless these fields are whole numbers >= 1 (or None)."""
    rule = "a whole number >= 1, or None" if or_none else "a whole number >= 1"
    check_fields(config, names, lambda n: (or_none and n is None) or (type(n) is int and n >= 1), rule)


def check_fields(config: YamlConfig, names: Iterable[str], is_valid: Callable[[Any], bool], rule: str) -> None:
    """Raise one ConfigError about the fields whose value is not what ``rule`` says."""
    where = type(config).__name__
    faults = [f"{where}.{n}: got {config[n]!r}; it must be {rule}." for n in names if not is_valid(config[n])]
    if faults:
        raise ConfigError("\n".join(faults))
