"""A checkpoint belongs to this job if it is newer than the launcher and older than this process."""

import os
from pathlib import Path

import pytest

from trainwright.parallel.restarts import is_continued


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    started = {os.getppid(): 1000.0, os.getpid(): 2000.0}
    monkeypatch.setattr("trainwright.parallel.restarts._start_of", started.get)
    file = tmp_path / "last_checkpoint"
    file.write_text("5")
    return file


@pytest.mark.parametrize(
    ("saved_at", "expected"),
    [(500, False), (1500, True), (2500, False)],
    ids=["an earlier job", "an earlier attempt", "this process"],
)
def test_whose_checkpoint_it_is(checkpoint: Path, saved_at: int, expected: bool) -> None:
    os.utime(checkpoint, (saved_at, saved_at))
    assert is_continued(checkpoint) is expected


def test_without_a_checkpoint_or_a_launcher(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.utime(checkpoint, (1500, 1500))
    assert not is_continued(checkpoint.with_name("none"))
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert not is_continued(checkpoint)


@pytest.mark.parametrize("count", ["0", "1"])
def test_a_system_without_start_times(checkpoint: Path, monkeypatch: pytest.MonkeyPatch, count: str) -> None:
    monkeypatch.setattr("trainwright.parallel.restarts._start_of", lambda process: None)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
    assert is_continued(checkpoint) is (count == "1")


def test_a_job_that_a_queue_starts_again_continues(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.utime(checkpoint, (500, 500))  # before this launcher
    monkeypatch.setenv("TRAINWRIGHT_RESUME", "1")
    assert is_continued(checkpoint)
    assert not is_continued(checkpoint.with_name("none"))
