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


def test_the_first_update_that_differs_by_a_bit(tmp_path: Path) -> None:
    losses = [1.0, 0.5, 0.25, 0.125]
    near = [1.0, 0.5, math.nextafter(0.25, 1.0), 0.0]
    found = compare_losses(run(tmp_path / "a", losses), run(tmp_path / "b", near))
    assert (found.first, found.num_differing, found.num_common) == (3, 2, 4)
    assert found.values == (0.25, math.nextafter(0.25, 1.0))


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


def test_facts_that_differ(tmp_path: Path) -> None:
    same = {"versions": {"torch": "2.13.0", "numpy": "2.0"}, "machine": {"cpus": 2}, "seed": 0}
    a = run(tmp_path / "a", [1.0], **same, git={"commit": "abc"}, data={"train": {"samples": 10, "fingerprint": "1"}})
    b = run(tmp_path / "b", [1.0], **same, git=None, data={"train": {"samples": 10, "fingerprint": "2"}})
    for one, rate in ((a, 0.1), (b, 0.2)):
        settings = f"train:\n  lr: {rate}\n  size: 8\n  output_dir: {one.folder}\n"
        (one.folder / "config.yaml").write_text(settings)
    _, sections = compare(a, b)
    found = {section.title: (section.differing, section.num_equal) for section in sections}
    assert found["Configuration"] == ({"train.lr": (0.1, 0.2)}, 1)
    assert found["Data"] == ({"train fingerprint": ("1", "2")}, 1)
    assert found["Code"] == ({"commit": ("abc", None)}, 0)
    assert found["Versions"] == ({}, 2)
    assert found["Machine"] == ({}, 1)
