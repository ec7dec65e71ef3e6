"""The settings of ``TrainingConfig`` for a reader: as text, and as a YAML file of the defaults."""

import os
from typing import Any, get_type_hints

from trainwright.config.training.aliases import ALIASES
from trainwright.config.training.checked_config import CATEGORIES, CheckedConfig, category_of
from trainwright.config.training.training_config import TrainingConfig
from trainwright.config.validation import allowed_text


def get_config_help(kind: type[CheckedConfig] = TrainingConfig) -> dict[str, dict[str, Any]]:
    """Print the description of each setting, by category.

    Returns ``{setting: {"help", "category", "allowed", "other_names", "default"}}``; a required setting has no default.
    """
    found = settings_help(kind)
    for category in CATEGORIES:
        print(f"{category}:")
        for name, info in found.items():
            if info["category"] == category:
                others = f" (also: {', '.join(info['other_names'])})" if info["other_names"] else ""
                default = f"Default: {info['default']!r}." if "default" in info else "Required."
                print(f"  {name}{others}\n      {info['help']}\n      It is {info['allowed']}. {default}")
    return found


def settings_help(kind: type[CheckedConfig]) -> dict[str, dict[str, Any]]:
    """The result of :func:`get_config_help`, without printing it."""
    found = {}
    hints = get_type_hints(kind, include_extras=True)
    for name, field in kind.model_fields.items():
        found[name] = {
            "help": field.description,
            "category": category_of(field),
            "allowed": allowed_text(hints[name]),
            "other_names": [other for other, synonym in ALIASES.items() if synonym.field == name],
        }
        if not field.is_required():
            found[name]["default"] = field.get_default(call_default_factory=True)
    return found


def dump_default_yaml(path: str | os.PathLike[str]) -> None:
    """Write the defaults of ``TrainingConfig`` as YAML, to be edited and read with ``load_from_yaml``."""
    TrainingConfig().save_to_yaml(path)
