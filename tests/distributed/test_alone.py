"""What one of several processes does alone ends the job after seconds, with one message that says what to do."""

import json
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.kinds import only_in_torture
from tests.torchrun import torchrun

SCRIPT = Path(__file__).parent / "alone_script.py"
LAYOUTS = {
    "DDP": {},
    "ZeRO 3": {"zero_stage": 3},
    "tensor": {"tensor_parallel_size": 2},
    "pipeline": {"pipeline_parallel_size": 2},
}


def run(folder: Path, how: str, layout: str = "DDP", *, code: int = 1, processes: int = 2) -> tuple[float, str]:
    """Seconds from what the process does to the end of the job, and what the processes have printed."""
    done = torchrun(SCRIPT, folder, how, json.dumps(LAYOUTS[layout]), code=code, processes=processes)
    end, output = time.time(), done.stdout
    acted = re.search(r"alone at ([\d.]+)", output)
    assert acted, output
    return end - float(acted[1]), output.partition("torch/distributed/elastic")[0]


def case(how: str, layout: str, head: str, *, often: bool = False) -> object:
    return pytest.param(how, layout, head, marks=[] if often else [only_in_torture], id=f"{layout}-{how}")


@pytest.mark.parametrize(
    ("how", "layout", "head"),
    [
        case("save", "DDP", "has come to Trainer.save: `trainer.save", often=True),
        case("evaluate", "DDP", "has come to Trainer.evaluate: `trainer.evaluate()`"),
        case("barrier", "DDP", "has made the call `torch.distributed.barrier()`"),
        case("freeze", "DDP", "has come to its first step, or the first one after parameters were frozen or unfrozen"),
        case("save", "ZeRO 3", "has come to Trainer.save: `trainer.save"),
        case("freeze", "ZeRO 3", "has come to the first step after parameters were frozen or unfrozen"),
        case("evaluate", "tensor", "has come to Trainer.evaluate: `trainer.evaluate()`"),
        case("save", "pipeline", "has come to Trainer.save: `trainer.save"),
    ],
)
def test_a_call_that_one_process_makes_alone_is_named(tmp_path: Path, how: str, layout: str, head: str) -> None:
    seconds, output = run(tmp_path / "run", how, layout)
    assert seconds < 30, output
    assert output.count(f"Only rank 0 {head}") == 1, output
    assert "not only where `if is_main_process()`" in output
    call = {"barrier": r"torch\.distributed\.barrier", "freeze": r"trainer\.train"}.get(how, rf"trainer\.{how}")
    assert re.search(rf"  rank 0: in iteration \d, `{call}\(.*` at alone_script.py:\d+ in ", output), output
    assert re.search(r"  rank 1: in iteration \d, `trainer.train\(\)` at alone_script.py:\d+ in <module>", output), (
        output
    )
    assert "Traceback" not in output


@pytest.mark.exhaustive(every=2)
@pytest.mark.parametrize("how", ["raises_before_save", "raises_in_evaluate"])
def test_a_failure_before_or_in_a_call_that_all_make_is_one_traceback(tmp_path: Path, how: str) -> None:
    seconds, output = run(tmp_path / "run", how)
    assert seconds < 30, output
    assert output.count("Traceback (most recent call last)") == 1, output
    assert output.count("[rank1]: ValueError: a bad sample\n") == 1, output
    line = "rank 0: ended in iteration 3, because rank 1 failed in iteration 3; see its traceback above."
    assert output.count(line) == 1, output
    assert "has left" not in output


@pytest.mark.parametrize("launcher", ["script", pytest.param("torchrun", marks=pytest.mark.exhaustive)])
def test_the_processes_end_when_their_launcher_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher: str
) -> None:
    if launcher == "torchrun":
        monkeypatch.setattr("tests.torchrun.python", lambda: sys.executable)  # it is their parent, no fork server
        monkeypatch.delenv("PYTHON_EXEC", raising=False)
    processes = 1 if launcher == "script" else 2  # it starts both itself
    # Its output ends with the last process.
    seconds, output = run(tmp_path / "run", "launcher", code=-signal.SIGKILL, processes=processes)
    assert seconds < 30, output
    # The process that sees it first says so; the other one ends without a line, unless it has seen it meanwhile.
    said = re.findall(r"rank (\d): ended in iteration (\d), because its launcher was killed\.", output)
    assert said, output
    assert len(set(said)) == len(said) <= 2, output
    assert {*said} <= {("0", "3"), ("1", "3"), ("1", "4")}, output
    assert "Traceback" not in output


LEFT = "ConfigError: Trainer.save needs all processes, and rank 1 has left."
CAUGHT = "rank 0: ended in iteration 4, because rank 1 failed in iteration 3 (ValueError: a bad sample), and"
ENDED = "The program of rank 1 has ended before it built its trainer."


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("how", "line", "absent"),
    [("after_save", LEFT, "ended without a report"), ("caught", CAUGHT, "Traceback"), ("ends", ENDED, "left")],
)
def test_a_process_that_has_left_ends_the_others_with_its_reason(
    how: str, line: str, absent: str, tmp_path: Path
) -> None:
    seconds, output = run(tmp_path / "run", how)
    assert seconds < 40, output
    assert output.count(line) == 1, output
    assert absent not in output


@pytest.mark.exhaustive
def test_a_failure_that_all_processes_catch_does_not_end_the_next_training_nor_does_a_late_process(
    tmp_path: Path,
) -> None:
    _, output = run(tmp_path / "run", "all_caught", code=0)
    assert output.count("trained again") == 2, output


def test_a_rate_that_is_changed_on_one_stage_only_is_refused(tmp_path: Path) -> None:
    _, output = run(tmp_path / "run", "rates", "pipeline")
    assert re.search(r"lr of the group with .*: [0-9.e-]+ on rank 0, but [0-9.e-]+ on rank 1", output), output
