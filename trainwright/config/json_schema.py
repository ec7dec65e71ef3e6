"""JSON schemas of YAML files, by which editors complete and check settings: of TrainingConfig, and of config files."""

import re
from pathlib import Path
from typing import Any

_DRAFT = "https://json-schema.org/draft/2020-12/schema"
_CALL = {"type": "object", "properties": {"_target_": {"type": "string"}}}


def schema_of_settings() -> dict[str, Any]:
    """Of a YAML file of ``TrainingConfig``: the settings in their categories, or at the top level; also aliases."""
    from trainwright.config.training.aliases import ALIASES
    from trainwright.config.training.training_config import TrainingConfig

    found = TrainingConfig.model_json_schema()
    settings: dict[str, Any] = found["properties"]
    categories: dict[str, Any] = {}
    for name, setting in settings.items():
        category = setting.pop("category")
        section = categories.setdefault(category, {"type": "object", "properties": {}, "additionalProperties": False})
        section["properties"][name] = setting
    aliases = {name: {"description": f"The setting {alias.field}."} for name, alias in ALIASES.items()}
    for name, alias in ALIASES.items():
        if alias.is_plain:
            aliases[name] = {**settings[alias.field], **aliases[name]}
        for section in categories.values():
            if alias.field in section["properties"]:
                section["properties"][name] = aliases[name]
    names = {**aliases, **settings}
    for category, section in categories.items():  # a category may have the name of a setting
        both = {"anyOf": [section, names.get(category)], "description": names.get(category, {}).get("description", "")}
        names[category] = both if category in names else section
    return {
        "$schema": _DRAFT,
        "title": "TrainingConfig of trainwright",
        "type": "object",
        "properties": names,
        "additionalProperties": False,
        "$defs": found.get("$defs", {}),
    }


def schema_of_config_files() -> dict[str, Any]:
    """Of a ``config.yaml``: the sections ``train`` and ``graph``, whose keys are fixed; the others are calls."""
    from pydantic import TypeAdapter

    from trainwright.config.lazy.lazy_config import get_config
    from trainwright.config.lazy.serialization import to_plain
    from trainwright.config.schema.keys import Run

    found = TypeAdapter(Run).json_schema()
    for name in ("train", "graph"):
        section = found["$defs"][name.title()]
        comments = _comments(name)
        for key, default in to_plain(get_config(f"common/{name}.py")[name])[0].items():
            setting = section["properties"].get(key)
            if setting is not None and not isinstance(default, dict):
                section["properties"][key] = setting = {**setting, "default": default}
            if setting is not None and key in comments:
                section["properties"][key] = {**setting, "description": comments[key]}
    loader = {"anyOf": [_CALL, {"type": "array"}, {"type": "object"}]}
    return {
        "$schema": _DRAFT,
        "title": "Config file of trainwright",
        "type": "object",
        "properties": {
            **found["properties"],
            "model": _CALL,
            "optim": _CALL,
            "dataloader": {"type": "object", "properties": {"train": loader, "test": loader}},
            "tokenization": {"type": "object"},
            "project_root": {"type": "string", "description": "The folder of the project's modules."},
        },
        "$defs": found["$defs"],
    }


def _comments(section: str) -> dict[str, str]:
    """The comment above each setting in the file of the defaults."""
    file = Path(__file__).parent / "defaults" / "common" / f"{section}.py"
    found: dict[str, str] = {}
    comment: list[str] = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if match := re.fullmatch(r"    # (.*)", line):
            comment.append(match[1])
        elif match := re.match(r"    (\w+)=", line):
            if comment:
                found[match[1]] = " ".join(comment)
            comment = []
    return found
