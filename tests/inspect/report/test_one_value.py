"""What a run shows in several places is the same in each."""

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest

from tests.inspect.report.conftest import train_by_files, train_by_objects
from trainwright.cli.main import main
from trainwright.report import Run


def shown(text: str) -> list[float]:
    return [float(value) for value in re.findall(r"total_loss (\S+?),? ", text + " ")]


@pytest.mark.parametrize("log_period", [3, 100], ids="log {}".format)
@pytest.mark.parametrize("ends", ["epochs", "within an epoch", "one epoch"])
@pytest.mark.parametrize("api", ["python", "config"])
def test_lines_files_and_reports_show_the_same_loss(
    api: str,
    ends: str,
    log_period: int,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    length = {"epochs": 24, "within an epoch": 21, "one epoch": 8}[ends]  # 8 updates each
    folder = tmp_path / "run"
    with caplog.at_level(logging.INFO):
        if api == "python":
            train_by_objects(
                folder, num_epochs=3, max_steps=length, early_stopping=None, log_steps=log_period, progress_bar=True
            )
        else:
            train_by_files(folder, train_iter=length, log_period=log_period)
    last = next(value for message in caplog.messages for value in shown(message.partition("  Last")[2]))
    epochs = [value for message in caplog.messages if message.startswith("Epoch ") for value in shown(message)]
    rows = [json.loads(line) for line in (folder / "metrics.json").read_text().splitlines()]
    written = [row["total_loss"] for row in rows if "total_loss" in row]
    main(["runs", str(tmp_path), "--json"])
    (run,) = json.loads(capsys.readouterr().out)
    in_report = re.search(r"Training loss</\w+>\D*([\d.]+)\D*?(mean|median)", Run(folder)._repr_html_())
    assert run["loss"] == written[-1] == pytest.approx(last, rel=1e-3)
    assert epochs[-1:] == ([] if ends == "one epoch" else [last])
    assert in_report is not None
    assert float(in_report[1]) == pytest.approx(last, rel=1e-2)
    assert in_report[2] == "mean"


@pytest.mark.parametrize("ema", [{"decay": 0.9}, {"average": "equal"}, {"decay": 0.9, "start": 20}, None], ids=str)
@pytest.mark.parametrize("api", ["python", "config"])
def test_each_place_says_that_an_evaluation_has_averaged_weights(
    api: str, ema: dict[str, Any] | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name = "SWA weights" if ema and "average" in ema else "EMA weights"
    with caplog.at_level(logging.INFO):
        if api == "python":
            train_by_objects(tmp_path, num_epochs=3, ema=ema, early_stopping=None, log_steps=8, progress_bar=True)
        else:
            train_by_files(tmp_path, ema=ema, log_period=8)
    text = caplog.text
    results = [line for line in text.splitlines() if re.search(r"Epoch \d|Evaluation  |Evaluation of", line)]
    results = [line for line in results if re.search("eval_loss|Acc@1", line)]
    said = [name in line for line in results]
    assert said == ([False] * 2 + [True] if ema and "start" in ema else [bool(ema)] * 3)
    assert (name in text.partition("  Last")[2].partition("  Folder")[0]) == bool(ema)
    assert (f"Evaluation  of the {name}" in text) == bool(ema)
    assert (name in Run(tmp_path)._repr_html_()) == bool(ema)
