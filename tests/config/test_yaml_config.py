"""Settings of a part as a dataclass with a YAML file."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest

from trainwright.base.errors import ConfigError, ConfigKeyError, ConfigTypeError, MissingFileError
from trainwright.config.yaml_config import YamlConfig


@dataclass
class LampConfig(YamlConfig):
    name = "lamp"
    config_type: ClassVar[str] = "light"
    filename: ClassVar[str] = "lamp.yaml"
    ignored_keys = frozenset({"bulb_type"})

    watts: int = 40
    warmth: float = 0.5
    is_on: bool = False
    colours: tuple[str, ...] = ("white",)
    id2label: Any = None
    rest: dict[str, Any] = field(default_factory=dict)


def test_save_then_load_is_the_identity(tmp_path: Path) -> None:
    labels = {0: "", 1: "1e3", 2: "no", 3: "${oc.env:HOME}", 4: "پلاک", 5: "a: b\n# c"}
    config = LampConfig(watts=7, warmth=1e-5, colours=("red", "blue"), id2label=labels, rest={"a": [1, None]})
    assert config.save(tmp_path) == tmp_path / "lamp.yaml"
    assert config.to_yaml().splitlines()[:3] == ["name: lamp", "config_type: light", "watts: 7"]
    assert LampConfig.load(tmp_path) == config
    assert LampConfig.load(tmp_path / "lamp.yaml", watts=8).watts == 8
    with pytest.raises(ConfigTypeError, match=r"LampConfig.id2label: got <object"):
        LampConfig(id2label=object()).to_yaml()


def test_a_subfolder_holds_the_file(tmp_path: Path) -> None:
    config = LampConfig(watts=7)
    assert config.save(tmp_path, subfolder="preprocessor/a") == tmp_path / "preprocessor" / "a" / "lamp.yaml"
    assert config.save(tmp_path, "x.yaml", "b") == tmp_path / "b" / "x.yaml"
    assert LampConfig.load(tmp_path, subfolder="preprocessor/a") == config
    assert LampConfig.load(tmp_path, "x.yaml", subfolder="b", watts=8).watts == 8
    with pytest.raises(MissingFileError, match="none"):
        LampConfig.load(tmp_path, subfolder="none")


def test_unknown_keys_are_named_all_at_once_with_the_nearest_field(tmp_path: Path) -> None:
    (tmp_path / "lamp.yaml").write_text("wats: 3\nname: lamp\ncolour: []\n")
    with pytest.raises(ConfigKeyError) as caught:
        LampConfig.load(tmp_path)
    first, second = str(caught.value).splitlines()
    assert "lamp.yaml: no such key: wats" in first
    assert "'watts'" in first
    assert "'colours'" in second


def test_a_file_of_another_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="name is 'torch'; LampConfig is for 'lamp'"):
        LampConfig.from_dict({"name": "torch"})
    with pytest.raises(ConfigError, match="config_type is 'model'"):
        LampConfig.from_dict({"config_type": "model"})
    older = LampConfig.from_dict({"bulb_type": 3, "config_type": "light", "watts": 2})
    assert older == LampConfig(watts=2)


def test_wrong_types_are_named_all_at_once() -> None:
    with pytest.raises(ConfigTypeError) as caught:
        LampConfig(watts="40", is_on=1, colours="white")
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    assert "LampConfig.watts: got '40' (str); it must be of type int" in lines[0]
    with pytest.raises(ConfigTypeError, match="watts: got True"):
        LampConfig(watts=True)


def test_none_is_the_default_and_lists_become_tuples() -> None:
    config = LampConfig(watts=None, warmth=1, colours=["red"])
    assert (config.watts, config.warmth, config.colours) == (40, 1.0, ("red",))
    assert type(config.warmth) is float


def test_update_changes_all_or_nothing() -> None:
    config = LampConfig()
    assert config.update({"watts": 3}, is_on=True) is config
    assert (config.watts, config.is_on) == (3, True)
    for wrong in ({"watts": 4, "is_of": False}, {"watts": 5, "warmth": "x"}):
        with pytest.raises(ConfigError):
            config.update(wrong)
        assert config.watts == 3


def test_it_reads_like_a_mapping() -> None:
    config = LampConfig(watts=3)
    assert config["watts"] == 3
    assert config.get("volts", 5) == 5
    assert "watts" in config
    assert "volts" not in config
    assert dict(config) == config.to_dict()
    assert config.keys() == ["watts", "warmth", "is_on", "colours", "id2label", "rest"]
    with pytest.raises(ConfigKeyError, match="'watts'"):
        config["wats"]
    config.to_dict()["rest"]["x"] = 1
    assert config.rest == {}  # it was a copy


def test_a_notebook_shows_all_fields_without_secrets() -> None:
    html = LampConfig(watts=7, rest={"api_key": "0123456789abcdef", "name": "<b>"})._repr_html_()
    assert "<b>LampConfig</b>" in html
    assert "watts</td><td>7<" in html
    assert "???" in html
    assert "0123456789abcdef" not in html
    assert "&lt;b&gt;" in html
