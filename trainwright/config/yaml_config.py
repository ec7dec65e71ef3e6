"""Settings of one part as a dataclass that knows its kind and its YAML file: the base of model and data configs."""

import copy
import os
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Self

import yaml

from trainwright.checkpoint.files import atomic_write
from trainwright.config.errors import ConfigError, ConfigKeyError, ConfigTypeError, did_you_mean
from trainwright.config.yaml_file import Dumper, read_mapping

_MARKS = ("name", "config_type")  # say what kind of file it is; no fields


@dataclass
class YamlConfig:
    """Base of a dataclass whose file says what it is: ``name`` (which class it configures) and ``config_type``.

    A field that is given as None where its default is another value takes its default. A list becomes a tuple, a whole
    number a float, where the default is one.

    Class attributes:
        name: the registered name of what it configures.
        filename: what its file is called.
        ignored_keys: keys of older files that have no meaning here.

    Raises:
        ConfigTypeError: a value is not of its default's type; names all of them.
    """

    name: ClassVar[str] = ""
    config_type: ClassVar[str] = ""
    filename: ClassVar[str] = "config.yaml"
    ignored_keys: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        faults = [fault for field in fields(self) if (fault := self._settle(field))]
        if faults:
            raise ConfigTypeError("\n".join(faults))

    @classmethod
    def from_dict(cls, content: Mapping[str, Any], *, source: str = "", **overrides: Any) -> Self:
        """A config of the fields in ``content``; ``overrides`` win.

        Raises:
            ConfigKeyError: a key is no field; names all of them with the nearest field.
            ConfigError: ``content`` is of another kind than this class.
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
        """Write the YAML file into the folder ``path``, or ``subfolder`` of it, which is made; returns the file."""
        file = Path(path, subfolder or "", filename or self.default_filename()).expanduser()
        file.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(file, self.to_yaml().encode())
        return file

    @classmethod
    def default_filename(cls) -> str:
        """What its file is called where no name is given."""
        return cls.filename

    def to_yaml(self) -> str:
        """The text of the file.

        Raises:
            ConfigTypeError: a value that YAML has no form for.
        """
        content = {mark: value for mark in _MARKS if (value := getattr(self, mark))} | _plain(self.to_dict())
        for key, value in content.items():
            try:
                yaml.dump(value, Dumper=Dumper)
            except yaml.YAMLError as error:
                raise ConfigTypeError(
                    f"{type(self).__name__}.{key}: got {type(value).__name__}, which a YAML file cannot hold; "
                    "give text, numbers, lists and mappings of these."
                ) from error
        text: str = yaml.dump(content, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=1000)
        return text

    def to_dict(self) -> dict[str, Any]:
        """The fields and their values, copied."""
        return {field.name: copy.deepcopy(getattr(self, field.name)) for field in fields(self)}

    def update(self, values: Mapping[str, Any] | None = None, **more: Any) -> Self:
        """Set fields, all or, if one is wrong, none; returns the config itself."""
        changes = {**(values or {}), **more}
        self._check_keys(list(changes), type(self).__name__)
        now = {field.name: getattr(self, field.name) for field in fields(self) if field.init}
        self.__dict__.update(vars(type(self)(**{**now, **changes})))
        return self

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

    def _settle(self, field: "Field[Any]") -> str | None:
        """Give a field its default or its default's type, where that changes nothing else; else what is wrong."""
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
        kind = type(default)
        if kind not in (bool, int, float, str, tuple) or (isinstance(value, kind) and type(value) is not bool):
            return None
        if type(value) is kind:
            return None
        got = f"{type(self).__name__}.{field.name}: got {value!r} ({type(value).__name__})"
        return f"{got}; it must be of type {kind.__name__}."


def _plain(value: Any) -> Any:
    """Mappings and sequences as dicts and lists, enum members as their values."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, YamlConfig):
        return _plain(value.to_dict())
    return getattr(value, "value", value) if type(value).__module__ != "builtins" else value
