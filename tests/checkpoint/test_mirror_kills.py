"""A training that is killed at any operation of a copy leaves a mirror from which another machine continues bitwise."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.checkpoint import mirror_program
from tests.fork_server import python
from trainwright.checkpoint.mirror_index import read_index
from trainwright.checkpoint.mirror_store import Store

REPOSITORY = Path(__file__).parents[2]
EVERY = (1, 1) if os.environ.get("TORTURE") else (3, 8)  # of the operations on a folder, and on the S3 server


def killed_at(number: int, moment: str, folder: Path, url: str) -> tuple[int, list[str]]:
    """The exit code, and the operations that were done."""
    log = folder.parent / "operations"
    log.write_text("")
    done = subprocess.run(
        [python(), str(Path(mirror_program.__file__)), str(folder), url, str(number), moment, str(log)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode in (0, -9), done.stderr
    return done.returncode, log.read_text().splitlines()


def complete(operations: list[str]) -> int:
    """The newest iteration whose copy was complete after these operations; -1: none."""
    newest, last = -1, -1
    for line in operations:
        if found := re.search(r"/model_(\d{7})\.[0-9a-f]{8}/manifest.json$", line):
            last = int(found[1])
        if re.search(r"(pipe_file|mv) .*/index-\d+\.json$", line):
            newest = max(newest, last)
    return newest


def check(url: str, moments: tuple[str, ...], tmp_path: Path, every: int = 1) -> int:
    """Kill at each operation, and continue elsewhere; returns the number of kills."""
    expected = mirror_program.train(tmp_path / "reference", None)
    code, operations = killed_at(0, "after", tmp_path / "run", f"{url}/whole")
    assert code == 0
    kills = 0
    for number in range(1, len(operations) + 1, every):
        for moment in moments:
            here, there, place = tmp_path / "run", tmp_path / "elsewhere", f"{url}/{number}-{moment}"
            shutil.rmtree(here, ignore_errors=True)
            code, done = killed_at(number, moment, here, place)
            assert code == -9
            kills += 1
            what = f"killed {moment} of operation {number}, {operations[number - 1]}"
            index, _ = read_index(Store(place))
            newest = max((_number(one.name) for one in index.checkpoints), default=-1) if index else -1
            assert newest >= complete(done), what
            assert mirror_program.train(there, place) == expected, what
            names = sorted(one.name.removesuffix("-2") for one in read_index(Store(place))[0].checkpoints)  # type: ignore[union-attr]
            assert names == [".model_best-0000001", "model_0000003"], what
            left = {name.partition("/")[0] for name in Store(place).sizes("")}
            places = {one.place for one in read_index(Store(place))[0].checkpoints}  # type: ignore[union-attr]
            if newest < mirror_program.ITERATIONS - 1:  # it has saved, and so deleted what the killed one has left
                assert {name for name in left if not name.startswith("index-")} == places, what
            shutil.rmtree(there)
    return kills


def _number(name: str) -> int:
    return int(re.findall(r"\d{7}", name)[-1]) if not name.startswith(".") else -1


@pytest.mark.slow
def test_a_kill_at_any_operation_on_a_folder(tmp_path: Path) -> None:
    assert check(f"file://{tmp_path}/mirror", ("half", "after"), tmp_path, EVERY[0]) > 30


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_kill_at_any_operation_on_an_s3_server(tmp_path: Path, s3: str) -> None:
    assert check(s3, ("after",), tmp_path, EVERY[1]) > 4
