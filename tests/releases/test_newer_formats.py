"""What a newer version has written is refused by name: nothing is read by halves, replaced, or started again."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from xxhash import xxh3_128_hexdigest

from tests.releases.runs import RUNS, working_in
from trainwright import LazyConfig, TrainingConfig
from trainwright.base.errors import ConfigError, UserError
from trainwright.checkpoint.errors import NewerFormatError
from trainwright.cli.main import main

RELEASE = Path(__file__).parent / "0.1.0"


def newest(run: Path) -> Path:
    """The checkpoint that a resume starts from."""
    (pointer,) = run.rglob("last_checkpoint")
    return pointer.parent / pointer.read_text()


def write_manifest(checkpoint: Path, content: dict[str, Any]) -> None:
    """With a checksum that fits, as a newer version writes it."""
    content.pop("manifest_xxh3_128", None)
    text = (json.dumps(content, indent=1) + "\n").encode()
    content["manifest_xxh3_128"] = xxh3_128_hexdigest(text)
    (checkpoint / "manifest.json").write_text(json.dumps(content, indent=1) + "\n")


def of_checkpoint(run: Path) -> str:
    content = json.loads((newest(run) / "manifest.json").read_text())
    write_manifest(newest(run), {**content, "format": 3, "of_a_newer_version": True})
    return r"manifest\.json: format 3; this version of trainwright reads 1 and 2.*update trainwright"


def of_state(run: Path) -> str:
    file = newest(run) / "trainer.json"
    text = json.dumps({**json.loads(file.read_text()), "format": 2}).encode()
    file.write_bytes(text)
    content = json.loads((newest(run) / "manifest.json").read_text())
    content["files"]["trainer.json"] = {"bytes": len(text), "xxh3_128": xxh3_128_hexdigest(text)}
    write_manifest(newest(run), content)
    return r"state of the training has format 2; this version of trainwright reads 1.*use that one, or start a new run"


def of_record(run: Path) -> str:
    file = run / "run.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps({"formats": {**content.get("formats", {}), "run.json": 2}, "starts": {"new": "form"}}))
    return r"run\.json: run\.json has format 2; this version of trainwright reads 1.*update trainwright"


def of_metrics(run: Path) -> str:
    content = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**content, "formats": {"run.json": 1, "metrics.json": 2}}))
    return r"run\.json: metrics\.json has format 2; this version of trainwright reads 1.*update trainwright"


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("change", [of_checkpoint, of_state, of_record, of_metrics])
def test_a_resume_is_refused_and_changes_nothing(
    name: str, change: Callable[[Path], str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / name
    shutil.copytree(RELEASE / name, run, symlinks=True)
    fact = change(run)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with working_in(tmp_path), pytest.raises(UserError, match=fact) as raised:
        RUNS[name](resume=True).train()
    assert isinstance(raised.value, NewerFormatError if change in (of_checkpoint, of_state) else ConfigError)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    assert "instead" not in caplog.text  # not an older checkpoint in its place


@pytest.mark.parametrize("name", ["config_file/config.yaml", "python/training_config.yaml"])
def test_settings_of_a_newer_version_are_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (RELEASE / name).read_text(encoding="utf-8")
    assert text.endswith("# Format: 1\n")
    newer = tmp_path / Path(name).name
    newer.write_text(text.replace("# Format: 1\n", "# Format: 2\n"), encoding="utf-8")
    load = TrainingConfig.load_from_yaml if name.startswith("python") else LazyConfig.load
    fact = r"format 2; this version of trainwright reads 1. A newer version has written it"
    with pytest.raises(ConfigError, match=fact):
        load(newer)
    if not name.startswith("python"):
        assert main(["config", "show", str(newer)]) == 2
        assert "format 2; this version of trainwright reads 1" in capsys.readouterr().err


@pytest.mark.parametrize("name", RUNS)
def test_commands_say_that_a_record_is_newer(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / name
    shutil.copytree(RELEASE / name, run, symlinks=True)
    of_record(run)
    for command in (["report", str(run), "-o", str(tmp_path / "r.html")], ["diff", str(run), str(RELEASE / name)]):
        assert main(command) == 2
        assert "run.json has format 2" in capsys.readouterr().err
    with caplog.at_level(logging.WARNING):
        assert main(["runs", str(tmp_path)]) == 0  # the other runs are listed
    assert "run.json has format 2" in caplog.text
    assert name in capsys.readouterr().out
