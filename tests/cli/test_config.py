"""``trainwright config``: what a configuration says after all overrides, and where each value comes from."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.conftest import FinishedRun
from trainwright import TrainingConfig
from trainwright.cli.main import main

CONFIG = """
import torch
from trainwright import LazyCall, get_config

model = LazyCall(torch.nn.Linear)(in_features=4, out_features=2)
optim = LazyCall(torch.optim.SGD)(lr=0.1)
train = get_config("common/train.py").train
train.update(train_iter=50, output_dir="here")
"""


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    file = tmp_path / "config.py"
    file.write_text(CONFIG)
    return file


def show(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, dict[str, Any]]:
    assert main(["config", "show", *map(str, arguments), "--json"]) == 0
    found: dict[str, dict[str, Any]] = json.loads(capsys.readouterr().out)
    return found


def test_each_setting_has_its_value_and_its_source(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = show(capsys, config_file, "optim.lr=0.5", "train.amp.enabled=true")
    assert found["optim.lr"] == {"value": 0.5, "source": "override optim.lr=0.5"}
    assert found["train.amp.enabled"] == {"value": True, "source": "override train.amp.enabled=true"}
    assert found["model.in_features"] == {"value": 4, "source": f"{config_file}:5"}
    assert found["train.train_iter"] == {"value": 50, "source": str(config_file)}
    assert found["train.seed"]["source"] == "default"
    assert found["graph.enabled"] == {"value": False, "source": "default"}


def test_only_changed_settings_as_a_table(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", str(config_file), "--changed", "train.seed=7"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == ["setting", "value", "set", "by"]
    assert ["train.seed", "7", "override", "train.seed=7"] in rows
    assert not any("default" in row for row in rows)
    assert main(["config", "diff", str(config_file), str(config_file)]) == 0
    assert capsys.readouterr().out == "no differences\n"


def test_the_yaml_is_a_config_file_of_the_same_settings(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "show", str(config_file), "--yaml", "optim.lr=0.5"]) == 0
    (tmp_path / "config.yaml").write_text(capsys.readouterr().out)
    assert main(["config", "diff", str(tmp_path / "config.yaml"), str(config_file)]) == 1
    assert [line.split() for line in capsys.readouterr().out.splitlines()][1:] == [["optim.lr", "0.5", "0.1"]]


def test_settings_of_the_python_api(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, rate in (("a", 0.1), ("b", 0.2)):
        (tmp_path / name).mkdir()
        config = TrainingConfig(output_dir="x", learning_rate=rate)
        config.save_to_yaml(tmp_path / name / "training_config.yaml")
    assert main(["config", "diff", str(tmp_path / "a"), str(tmp_path / "b"), "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {"learning_rate": [0.1, 0.2]}
    found = show(capsys, tmp_path / "a")
    assert found["learning_rate"]["source"].endswith("training_config.yaml")
    assert found["num_epochs"]["source"] == "default"


def test_secrets_are_not_shown(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert show(capsys, config_file, "+model.api_token=hf_abcdefghij")["model.api_token"]["value"] == "???"


def test_the_schema_is_written(tmp_path: Path, finished: FinishedRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "schema", "--output", str(tmp_path / "schema.json")]) == 0
    assert "yaml-language-server" in capsys.readouterr().out
    schema = json.loads((tmp_path / "schema.json").read_text())
    saved = yaml.safe_load((finished.folder / "config.yaml").read_text())
    assert {*saved} <= {*schema["properties"]}
    assert {*saved["train"]} <= {*schema["$defs"]["Train"]["properties"]}
    assert main(["config", "schema", "python"]) == 0
    assert "learning" in json.loads(capsys.readouterr().out)["properties"]


def test_a_file_with_an_equals_sign_in_its_path(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = config_file.parent / "sweep" / "lr=0.1" / "m=2.py"
    file.parent.mkdir(parents=True)
    config_file.rename(file)
    assert show(capsys, file, "train.train_iter=7")["train.train_iter"]["value"] == 7
