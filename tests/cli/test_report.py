"""``trainwright report`` writes a page."""

import sys
from pathlib import Path
from typing import Any

import pytest

from trainwright.cli.main import main


def test_a_report_of_a_finished_run(finished: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "new" / "page.html"
    assert main(["report", str(finished.folder), "--output", str(file)]) == 0
    assert capsys.readouterr().out.startswith(f"{file} (")
    text = file.read_text(encoding="utf-8")
    assert "Acc@1" in text
    assert "model_0000044" in text


def test_by_default_the_page_is_in_the_folder_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.json").write_text('{"iteration": 0, "total_loss": 1.0}\n')
    monkeypatch.chdir(tmp_path)
    assert main(["report", "a"]) == main(["report", "a", "b"]) == 0
    assert sorted(path.name for path in tmp_path.rglob("*.html")) == ["report.html", "report.html"]
    assert (tmp_path / "a" / "report.html").exists()
    assert (tmp_path / "report.html").exists()


def test_without_plotly_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    assert main(["report", str(tmp_path)]) == 2
    assert "pip install plotly" in capsys.readouterr().err
