"""JSON schemas of YAML files, by which editors complete and check settings: of TrainingConfig, and of config files."""

from typing import Any

_DRAFT = "https://json-schema.org/draft/2020-12/schema"
_CALL = {"type": "object", "properties": {"_target_": {"type": "string"}}}


def schema_of_settings() -> dict[str, Any]:
    """Of a YAML file of ``TrainingConfig``: the settings in their categories, or at the top level; also aliases."""
    from trainwright.config.settings import TrainingConfig

    found = TrainingConfig.model_json_schema()
    settings: dict[str, Any] = found["properties"]
    categories: dict[str, Any] = {}
    for name, setting in settings.items():
        category = setting.pop("category")
        section = categories.setdefault(category, {"type": "object", "properties": {}, "additionalProperties": False})
        section["properties"][name] = setting
    aliases = {name: {"description": f"The setting {alias.field}."} for name, alias in TrainingConfig.aliases.items()}
    for name, alias in TrainingConfig.aliases.items():
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

    from trainwright.config.settings import SECTIONS, type_of_sections

    found = TypeAdapter(type_of_sections()).json_schema()
    for name, section in SECTIONS.items():
        properties = found["$defs"][name.title()]["properties"]
        for key in section.keys:
            if key.default is None or isinstance(key.default, bool | int | float | str):
                properties[key.name]["default"] = key.default
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
