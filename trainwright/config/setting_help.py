"""What each setting is for, in words."""

import os
from typing import Any

from trainwright.config.checked import CheckedConfig
from trainwright.config.setting_types import CATEGORIES, allowed_text, category_of
from trainwright.config.synonyms import SYNONYMS
from trainwright.config.training_config import TrainingConfig


def get_config_help(kind: type[CheckedConfig] = TrainingConfig) -> dict[str, dict[str, Any]]:
    """Print what each setting is for, by category.

    Returns ``{setting: {"help", "category", "allowed", "other_names", "default"}}``, the last one if there is one.
    """
    found = settings_help(kind)
    for category in CATEGORIES:
        print(f"{category}:")
        for name, told in found.items():
            if told["category"] == category:
                others = f" (also: {', '.join(told['other_names'])})" if told["other_names"] else ""
                default = f"Default: {told['default']!r}." if "default" in told else "Must be given."
                print(f"  {name}{others}\n      {told['help']}\n      It is {told['allowed']}. {default}")
    return found


def settings_help(kind: type[CheckedConfig]) -> dict[str, dict[str, Any]]:
    """What :func:`get_config_help` returns, without printing."""
    found = {}
    for name, field in kind.model_fields.items():
        found[name] = {
            "help": field.description,
            "category": category_of(field),
            "allowed": allowed_text(field),
            "other_names": [other for other, synonym in SYNONYMS.items() if synonym.field == name],
        }
        if not field.is_required():
            found[name]["default"] = field.get_default(call_default_factory=True)
    return found


def dump_default_yaml(path: str | os.PathLike[str]) -> None:
    """Write the defaults of ``TrainingConfig`` as YAML, to be edited and read with ``load_from_yaml``."""
    TrainingConfig().save_to_yaml(path)
