"""The picture of a run's curves."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from trainwright.cli.main import main
from trainwright.inspect.report.picture import draw_curves


@pytest.mark.exhaustive(every=2)
@pytest.mark.parametrize(("run", "width"), [("files", 1080), ("objects", 768)])
def test_a_run_of_each_api_has_a_picture(
    run: str, width: int, runs_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / run
    copy.mkdir()
    for name in ("metrics.json", "losses.csv", "run.json"):
        (copy / name).write_bytes((runs_folder / run / name).read_bytes())
    assert main(["report", "--png", str(copy)]) == 0
    assert capsys.readouterr().out == f"{copy / 'curves.png'}\n"
    picture = Image.open(copy / "curves.png")
    assert picture.size == (width, 456)  # config files: a second chart with Acc@1
    assert picture.info["Software"] == "trainwright"
    colours = {tuple(colour) for colour in np.asarray(picture.convert("RGB")).reshape(-1, 3)}
    assert {(0x2F, 0x6F, 0xED), (0xE8, 0x71, 0x0A)} <= colours  # training and evaluation
    assert sorted(path.name for path in copy.iterdir()) == ["curves.png", "losses.csv", "metrics.json", "run.json"]


def test_a_run_without_losses_has_none(tmp_path: Path) -> None:
    (tmp_path / "metrics.json").write_text(json.dumps({"iteration": 0, "a": 1.0}) + "\n")
    assert draw_curves(tmp_path) is None
    assert not (tmp_path / "curves.png").exists()
