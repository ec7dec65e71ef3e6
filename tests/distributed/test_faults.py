"""A rank that fails or hangs ends the job: its own traceback first and once, and the stacks of all where one hangs."""

import json
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.kinds import only_in_torture
from tests.torchrun import torchrun

SCRIPT = Path(__file__).parent / "faults_script.py"
OF_LAYOUTS = Path(__file__).parent / "layout_faults_script.py"
LAYOUTS = {
    "tensor": (2, {"tensor_parallel_size": 2}),
    "pipeline": (2, {"pipeline_parallel_size": 2}),
    "ZeRO 3": (2, {"zero_stage": 3}),
    "hybrid": (4, {"zero_stage": 3, "replicate_size": 2}),
    "pipeline, ZeRO 2": (4, {"pipeline_parallel_size": 2, "zero_stage": 2}),
    "tensor, pipeline": (4, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
}
FAULTS = ("raise", "data", "hook", "hang", "kill")


def run(folder: Path, how: str, processes: int, layout: dict[str, int] | None = None) -> tuple[float, str]:
    """Seconds from the failure to the end of the job, and its output."""
    done = launch(folder, how, processes, layout)
    end = time.time()
    assert done.returncode != 0, done.stdout
    failed = re.search(r"failing at ([\d.]+)", done.stdout)
    assert failed, done.stdout
    return end - float(failed[1]), done.stdout


def launch(
    folder: Path, how: str, processes: int, layout: dict[str, int] | None = None
) -> "subprocess.CompletedProcess[str]":
    if layout is None:
        return torchrun(SCRIPT, folder, how, processes=processes, code=None)
    return torchrun(OF_LAYOUTS, folder, how, json.dumps(layout), processes=processes, code=None)


def test_the_traceback_of_the_rank_that_raises_comes_first_and_once(tmp_path: Path) -> None:
    seconds, output = run(tmp_path / "run", "raise", 3)
    assert seconds < 30, output
    ours = output.partition("torch/distributed/elastic")[0]  # then the launcher's own report
    assert ours.count("Traceback (most recent call last)") == 1, output
    assert ours.count("ValueError: the data of this rank are bad") == 1, output
    traceback, line = ours.index("[rank1]: Traceback"), "ended in iteration 6, because rank 1 failed in iteration 6"
    for other in re.finditer(line, ours):
        assert other.start() > traceback
    assert line in ours, output
    cause = output.partition("Root Cause")[2]
    assert re.search(r"rank +: 1 .*ValueError: the data of this rank are bad", cause, re.DOTALL), output
    assert "Connection closed by peer" not in ours


def test_a_rank_that_hangs_is_named_with_the_stacks_of_all(tmp_path: Path) -> None:
    seconds, output = run(tmp_path / "run", "hang", 2)
    assert 3 <= seconds < 30, output
    for rank in range(2):
        assert f"rank {rank}: the stacks of all threads in iteration 6:" in output
    assert "waited at one place for 3 s (hang_timeout_s)" in output
    assert re.search(r"rank 0: waits for the others in iteration 6, at ", output), output
    assert re.search(r"rank 1: did not come in iteration 6, at faults_script.py:\d+ in forward", output), output


@pytest.mark.exhaustive(every=2)
def test_a_rank_that_is_killed_ends_the_job(tmp_path: Path) -> None:
    seconds, output = run(tmp_path / "run", "kill", 2)
    assert seconds < 30, output
    assert "exitcode  : -9" in output
    assert "Connection closed by peer" not in output.partition("torch/distributed/elastic")[0]


@pytest.mark.exhaustive
def test_a_parameter_that_a_later_update_leaves_out_is_named_with_the_setting(tmp_path: Path) -> None:
    done = launch(tmp_path / "run", "unused", 2)
    assert done.returncode == 0, done.stdout
    names = {"objects": "TrainingConfig", "config_files": "train.dist"}
    for api, where in names.items():
        text = f"{api}, False: The update before this one left out parameters that earlier ones used: extra."
        assert done.stdout.count(text) == 2, done.stdout
        assert f"set {where}.find_unused_parameters=True" in done.stdout
        assert done.stdout.count(f"{api}, True: trained") == 2, done.stdout


def of_layout(layout: str, how: str) -> Any:
    mark = {"raise": [], "hang": [pytest.mark.exhaustive], "kill": [pytest.mark.exhaustive]}.get(how)
    marks = [only_in_torture] if layout != "tensor, pipeline" or mark is None else mark
    return pytest.param(layout, how, marks=marks, id=f"{layout}-{how}")


@pytest.mark.parametrize(("layout", "how"), [of_layout(layout, how) for layout in LAYOUTS for how in FAULTS])
def test_a_failure_of_one_process_under_a_layout(tmp_path: Path, layout: str, how: str) -> None:
    processes, settings = LAYOUTS[layout]
    seconds, output = run(tmp_path / "run", how, processes, settings)
    assert seconds < 30, output
    ours = output.partition("torch/distributed/elastic")[0]  # then the launcher's own report
    assert "Connection closed by peer" not in ours
    last = processes - 1
    if how == "kill":
        assert "exitcode  : -9" in output
        assert "Traceback (most recent call last)" not in ours, output
    elif how == "hang":
        for rank in range(processes):
            assert f"rank {rank}: the stacks of all threads in iteration 6:" in ours, output
        assert re.search(rf"rank {last}: did not come in iteration 6, at layout_faults_script.py:\d+ in fail", ours), (
            output
        )
    else:
        assert ours.count("Traceback (most recent call last)") == 1, output
        assert ours.count("ValueError: the last process fails") == 1, output
        lines = re.findall(r"rank \d: ended in iteration (\d), because rank (\d) failed in iteration 6", output)
        assert all(rank == str(last) for _, rank in lines), output  # the launcher may end the others before their line
        traceback = ours.index(f"[rank{last}]: Traceback")
        assert all(line.start() > traceback for line in re.finditer(", because rank", ours)), output
