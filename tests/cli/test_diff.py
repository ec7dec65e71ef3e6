"""``trainwright diff`` compares two runs."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from trainwright.cli.main import main


@pytest.fixture
def two(finished: Any, tmp_path: Path) -> tuple[Path, Path]:
    """A finished run, and its copy."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for file in ("config.yaml", "losses.csv", "metrics.json", "run.json"):
            shutil.copy(finished.folder / file, tmp_path / name / file)
    return tmp_path / "a", tmp_path / "b"


def test_equal_runs(two: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", *map(str, two)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "equal by bits in all 60 updates" in lines[0]
    titles = [line.removesuffix(": equal") for line in lines[1:]]
    assert set(titles) - {"Code"} == {"Configuration", "Run", "Data", "Versions", "Machine"}  # perhaps in no repository


def test_what_differs_is_listed(two: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    _, b = two
    rows = (b / "losses.csv").read_text().splitlines()
    rows[42] = f"{rows[42].partition(',')[0]},0.125"
    (b / "losses.csv").write_text("\n".join(rows) + "\n")
    settings = (b / "config.yaml").read_text()
    assert "seed: 1234" in settings
    (b / "config.yaml").write_text(settings.replace("seed: 1234", "seed: 4321"))
    record = json.loads((b / "run.json").read_text())
    record["starts"][0]["versions"]["torch"] = "2.12.0"
    (b / "run.json").write_text(json.dumps(record))
    assert main(["diff", *map(str, two)]) == 1
    said = capsys.readouterr().out
    assert "equal by bits until update 41; update 42 is the first that differs" in said
    assert "and 0.125 (1 of 60 differ)" in said
    assert ["train.seed", "1234", "4321"] in [line.split() for line in said.splitlines()]
    assert "2.12.0" in said
    assert "\n\n\n" not in said
    assert main(["diff", *map(str, two), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["losses"]["first"] == 42


def test_a_wrong_path_exits_2(two: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", str(two[0]), str(two[0].parent)]) == 2
    assert "has 2 runs (a, b …); pass the folder of one." in capsys.readouterr().err
    assert main(["diff", str(two[0]), str(two[0] / "nowhere")]) == 2
    assert "nowhere: there is no such folder" in capsys.readouterr().err
