"""Settings in YAML: ``{category: {setting: value}}`` is written; that and a flat ``{setting: value}`` are read."""

import os
from collections.abc import Iterator, Mapping
from typing import Any

import yaml
from pydantic import BaseModel

from trainwright.checkpoint.files import atomic_write
from trainwright.config.errors import ConfigError, did_you_mean
from trainwright.config.secrets import warn_of_hidden, without_secrets
from trainwright.config.training.aliases import SYNONYMS, field_of
from trainwright.config.training.types import CATEGORIES, category_of
from trainwright.config.yaml_file import Dumper, load_yaml


def write_settings(path: str | os.PathLike[str], settings: Mapping[str, Any], kind: type[BaseModel]) -> None:
    """Write plain settings by category, with ``???`` for what looks secret and one warning that names it.

    Raises:
        ConfigError: a value that YAML has no form for, such as a function.
    """
    content: dict[str, dict[str, Any]] = {category: {} for category in CATEGORIES}
    for name, value in settings.items():
        try:
            yaml.dump(value, Dumper=Dumper)
        except yaml.YAMLError as error:
            raise ConfigError(
                f"{kind.__name__}.{name}: got {value!r}, which a YAML file cannot hold; give text, numbers, lists and"
                " dicts of these, or the object itself to the Trainer."
            ) from error
        content[category_of(kind.model_fields[name])][name] = value
    shown, hidden = without_secrets({category: named for category, named in content.items() if named})
    atomic_write(path, yaml.dump(shown, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=1000).encode())
    warn_of_hidden(hidden, path)


def read_settings(path: str | os.PathLike[str], kind: type[BaseModel]) -> tuple[dict[str, Any], list[str]]:
    """The settings of a file by the names that stand there, and what is wrong with their places.

    Raises:
        MissingFileError: there is no such file.
        ConfigError: it is no YAML of plain values, or one of them is ``???``, still to be given.
    """
    values: dict[str, Any] = {}
    faults = []
    known = {*kind.model_fields, *SYNONYMS}
    for category, name, value in _entries(_content(path), known):
        where = name if category is None else f"{category}.{name}"
        if name not in known and (category is not None or isinstance(value, Mapping)):
            what = "no such setting" if category is not None else "no such category or setting"
            faults.append(f"{where}: {what}. {did_you_mean(name, known if category else {*CATEGORIES, *known})}")
            continue
        right = category_of(kind.model_fields[field_of(name)]) if name in known else None
        if category is not None and category != right:
            faults.append(f"{where}: {name} is not of this category. Did you mean '{right}.{name}'?")
        if name in values and values[name] != value:
            faults.append(f"{where}: got {value!r}, and elsewhere in the file {values[name]!r}. Give one of them.")
        values[name] = value
    return values, faults


def _entries(content: Mapping[Any, Any], known: set[str]) -> Iterator[tuple[str | None, str, Any]]:
    """``(category, name, value)``; the category is None for what stands at the top."""
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

    cfg = load_yaml(path)  # data: it reads 5e-5 as a number, as people do, and runs nothing
    try:
        content = OmegaConf.to_container(cfg, resolve=True)
        missing = sorted(OmegaConf.missing_keys(cfg))
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {str(error).splitlines()[0]}") from error
    if missing:
        names = [key.partition(".")[2] if key.partition(".")[0] in CATEGORIES else key for key in missing]
        raise ConfigError(
            f"{path}: {', '.join(names)}: no value yet (it is '???', as is what looked secret when the file was"
            " written). Write it in, or make the configuration in Python."
        )
    assert isinstance(content, dict), "load_yaml gives a mapping"
    return content
