"""Runs of each release: this version continues them, and they end with the bits of an uninterrupted run."""

import json
import logging
import shutil
from pathlib import Path

import pytest

from tests.releases.runs import RUNS, STOP, UPDATES, ended, stop_within, working_in
from trainwright import TrainingConfig
from trainwright.events.formats import parse_rows, read_starts

RELEASES = sorted(path for path in Path(__file__).parent.iterdir() if path.name[0].isdigit())


def test_there_are_runs_of_the_first_release() -> None:
    assert RELEASES[0].name == "0.1.0"
    assert all((release / name).is_dir() for release in RELEASES for name in RUNS)


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("release", RELEASES, ids=lambda path: path.name)
def test_a_run_of_a_release_is_continued_bitwise(
    release: Path, name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "whole").mkdir()
    with working_in(tmp_path / "whole"):
        whole = RUNS[name](resume=False)
        whole.train()
    shutil.copytree(release / name, tmp_path / "kept" / name, symlinks=True)
    caplog.clear()
    with working_in(tmp_path / "kept"):
        kept = RUNS[name](resume=True)
        assert kept.start_iter == STOP
        kept.train()
    assert ended(kept) == ended(whole)
    assert kept.iterations_done == UPDATES
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("release", RELEASES, ids=lambda path: path.name)
def test_the_other_files_of_a_release_are_read(release: Path, name: str) -> None:
    folder = release / name
    (start,) = read_starts(folder / "run.json")
    assert (start["status"], start["iterations_done"], start["last_iteration"]) == ("failed", STOP, UPDATES)
    rows = list(parse_rows((folder / "metrics.json").read_text().splitlines()))
    logged = [0, 1, 2, 3, 4] if name == "python" else [1, 3, 4]
    assert [row["iteration"] for row in rows if "total_loss" in row] == logged
    if name == "python":
        assert TrainingConfig.load_from_yaml(folder / "training_config.yaml").num_epochs == 4


@pytest.mark.parametrize("name", RUNS)
def test_the_kept_part_of_a_run_has_the_same_bits_everywhere(name: str, tmp_path: Path) -> None:
    """What is made here is what was kept: no value up to there is rounded."""
    with working_in(tmp_path):
        stop_within(name)
    manifests = [
        next(json.loads(path.read_text()) for path in sorted((folder / name).rglob("manifest.json"))[-1:])
        for folder in (RELEASES[-1], tmp_path)
    ]
    tensors = [
        {file: entry["xxh3_128"] for file, entry in manifest["files"].items() if file.endswith(".safetensors")}
        for manifest in manifests
    ]
    assert tensors[0] == tensors[1]
