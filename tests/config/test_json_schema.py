"""JSON schemas describe what the library accepts."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from trainwright import TrainingConfig
from trainwright.config.json_schema import schema_of_config_files, schema_of_settings
from trainwright.config.lazy.lazy_config import get_config
from trainwright.config.lazy.serialization import to_plain


def test_every_setting_is_described_in_its_category(tmp_path: Path) -> None:
    TrainingConfig().save_to_yaml(tmp_path / "config.yaml")
    properties = schema_of_settings()["properties"]
    for category, settings in yaml.safe_load((tmp_path / "config.yaml").read_text()).items():
        kinds = properties[category].get("anyOf", [properties[category]])
        for name in settings:
            assert kinds[0]["properties"][name]["description"]
            assert properties[name]["description"]
    assert properties["lr"]["exclusiveMinimum"] == 0  # an alias
    assert properties["batch_size"] == {
        "default": 8,
        "minimum": 1,
        "title": "Batch Size",
        "type": "integer",
        "description": "Samples in a batch of one process.",
    }


def test_the_train_section_has_its_defaults_and_comments() -> None:
    schema = schema_of_config_files()
    train = schema["$defs"]["Train"]["properties"]
    assert {*get_config("common/train.py").train} <= {*train}
    assert train["test_micro_batch_size"]["default"] == 32
    assert train["test_micro_batch_size"]["description"].startswith("Samples per rank")
    assert schema["$defs"]["Train"]["additionalProperties"] is False


def test_a_validator_accepts_the_defaults_and_refuses_a_misspelt_key() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    content: dict[str, Any] = {"train": to_plain(get_config("common/train.py").train)[0]}
    jsonschema.validate(content, schema_of_config_files())
    content["train"]["train_itr"] = 3
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(content, schema_of_config_files())
