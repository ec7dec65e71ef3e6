"""examples/mnist/plot_curves.py draws the metrics of a run."""

import json
import runpy
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="pip install 'trainwright[examples]'")

PROGRAM = Path(__file__).parents[2] / "examples" / "mnist" / "plot_curves.py"


def test_a_picture_of_loss_accuracy_and_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"iteration": at, "total_loss": 1 / (at + 1), "lr": 0.1} for at in range(4)]
    rows.append({"iteration": 4, "Acc@1": 98.5})
    (tmp_path / "metrics.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    runpy.run_path(str(PROGRAM))["main"](str(tmp_path))
    picture = tmp_path / "curves.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out == f"{picture}: plotted 5 logged iterations.\n"
