"""Registries of classes by the ``name`` of their config class, which is stored in the files of a folder."""

import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from trainwright.base.errors import ConfigError, ConfigKeyError, ConfigTypeError, did_you_mean
from trainwright.config.yaml_config import YamlConfig

T = TypeVar("T")


class Registry(Generic[T]):
    """The registry of `register_dataset` and similar decorators. ``kind`` names its classes in messages.

    ``own`` maps the names of built-in classes to their modules, which are imported at the first use.
    """

    def __init__(self, kind: str, config_base: type[YamlConfig], own: Mapping[str, str]) -> None:
        self.kind = kind
        self._config_base = config_base
        self._own = own
        self._classes: dict[str, type[T]] = {}

    def decorator(self, name: str, config_class: type[YamlConfig]) -> Callable[[Any], Any]:
        """A class decorator that registers the class as ``name`` and sets its ``config_class``.

        Defining a class again, as a notebook does, replaces it.
        """
        where = f"register_{self.kind}({name!r})"
        if not (isinstance(config_class, type) and issubclass(config_class, self._config_base)):
            raise ConfigTypeError(
                f"{where}: config_class must be a subclass of {self._config_base.__name__}; got {config_class!r}."
            )
        if config_class.name != name:
            raise ConfigError(
                f"{where}: {config_class.__name__}.name is {config_class.name!r}; write `name = {name!r}` into it, "
                f"so that its file names the {self.kind}."
            )

        def register(cls: Any) -> Any:
            if self._own.get(name, cls.__module__) != cls.__module__:
                self._load(name)
            there = self._classes.get(name)
            if there is not None and (there.__module__, there.__qualname__) != (cls.__module__, cls.__qualname__):
                raise ConfigError(
                    f"{where}: {there.__module__}.{there.__qualname__} has this name; give {cls.__qualname__} another."
                )
            cls.config_class = config_class
            self._classes[name] = cls
            return cls

        return register

    def find(self, name: Any, where: str) -> type[T]:
        """The class that is registered under a name."""
        self._load(name)
        if name not in self._classes:
            raise ConfigKeyError(
                f"{where}: no {self.kind} is registered as {name!r}. {did_you_mean(str(name), self._classes)} For a "
                f"class of your own, import the module with @register_{self.kind}({name!r}, config_class=...) first."
            )
        return self._classes[name]

    def __iter__(self) -> Iterator[type[T]]:
        """All classes, built-in ones first."""
        for name in self._own:
            self._load(name)
        names = dict.fromkeys([*self._own, *self._classes])
        return iter([self._classes[name] for name in names])

    def _load(self, name: Any) -> None:
        """Import the built-in class of a name; for an unknown name import all, so that the nearest name is found."""
        if name in self._classes:
            return
        for module in {self._own[name]} if name in self._own else set(self._own.values()):
            importlib.import_module(module)
