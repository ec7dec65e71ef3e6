"""Findings as a table that fits the terminal, as one line, and as JSON."""

import io
import json
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


def test_a_report_is_true_without_problems() -> None:
    assert not REPORT
    assert Report(REPORT.findings[::2])
    assert [one.check for one in REPORT.problems] == ["labels"]


def test_undecided_is_not_passed() -> None:
    report = Report((*REPORT.findings[::2], Finding("one_batch", "undecided", "Noise.")))
    assert report  # without a problem
    assert report.summary().endswith("Not passed, as the evidence is too weak: one_batch.")
    assert report.to_dict()["passed"] is False


def test_json() -> None:
    found = json.loads(json.dumps(REPORT.to_dict()))
    assert found["passed"] is False
    assert found["findings"][1]["values"] == {"n": 1}
