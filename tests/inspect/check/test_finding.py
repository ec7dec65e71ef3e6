"""Findings as a table that fits the terminal, as one line, and as JSON."""

import io
from typing import Any

import pytest

from trainwright.inspect.check.finding import Finding, Report

REPORT = Report(
    (
        Finding("steps", "passed", "12 updates, loss 2.3 to 1.7.", seconds=1.0),
        Finding("labels", "problem", "It learned by heart, " + "and nothing else " * 6, "Look.", {"n": 1}),
        Finding("workers", "skipped", "samples are read without workers."),
    )
)  # fmt: skip


@pytest.mark.parametrize("width", [80, 160])
def test_the_table_is_as_wide_as_the_terminal(width: int, monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    file = io.StringIO()
    REPORT.print(file)
    lines = file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert lines[0].split() == ["check", "result", "evidence"]
    assert any(line.split()[:1] == ["→"] for line in lines)
    assert lines[-1] == "1 problem, 1 passed, 1 skipped in 1 s"
    assert "\x1b" not in file.getvalue()
