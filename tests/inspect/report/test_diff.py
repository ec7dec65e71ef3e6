"""Two runs are compared by what they used, and by the bits of their losses."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from trainwright.inspect.diff import compare, compare_losses
from trainwright.inspect.report.run_data import RunData


def run(folder: Path, losses: list[float], start: int = 0, **facts: Any) -> RunData:
    folder.mkdir()
    rows = "".join(f"{start + at},{loss!r}\n" for at, loss in enumerate(losses))
    (folder / "losses.csv").write_text(f"iteration,total_loss\n{rows}")
    (folder / "run.json").write_text(json.dumps({"starts": [facts]}))
    return RunData(folder, folder.name)


@pytest.mark.parametrize(
    ("one", "other", "first"),
    [
        ([1.0, math.nan], [1.0, math.nan], None),
        ([1.0, math.nan], [1.0, 2.0], 2),
        ([0.0], [-0.0], 1),
        ([1.0, 2.0, 3.0], [1.0], None),
    ],
    ids=["nan", "one nan", "sign of zero", "shorter"],
)
def test_values_that_are_special(tmp_path: Path, one: list[float], other: list[float], first: int | None) -> None:
    assert compare_losses(run(tmp_path / "a", one), run(tmp_path / "b", other)).first == first


def test_runs_without_a_common_update(tmp_path: Path) -> None:
    a, b = run(tmp_path / "a", [1.0]), run(tmp_path / "b", [1.0], start=5)
    assert "no update in common" in compare_losses(a, b).fault
    (tmp_path / "b" / "losses.csv").unlink()
    assert compare_losses(a, b).fault == "b has no losses.csv"


def test_the_number_of_processes_is_a_difference(tmp_path: Path) -> None:
    a, b = run(tmp_path / "a", [1.0], processes=1), run(tmp_path / "b", [1.0], processes=2)
    differing = {name: pair for section in compare(a, b)[1] for name, pair in section.differing.items()}
    assert differing == {"processes": (1, 2)}
