"""The programs of the Python API do what they show, each in a process of its own, as a user starts it."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("sklearn", reason="the digits are scikit-learn's: pip install 'trainwright[examples]'")

PROGRAMS = Path(__file__).parents[2] / "examples" / "objects"


@pytest.fixture
def run(run_python: Callable, tmp_path: Path) -> Callable[[str], str]:
    """``run(name)``: what a program prints, without the library's own lines."""

    def run(name: str) -> str:
        printed = run_python("-W", "error", PROGRAMS / name, cwd=tmp_path).stdout.splitlines()
        return "\n".join(line for line in printed if not re.match(r"  |\d\d:\d\d:\d\d ", line))

    return run


def test_the_shortest_program_learns_to_read_digits(run: Callable[[str], str], tmp_path: Path) -> None:
    (percent,) = re.findall(r"([\d.]+)% accuracy", run("shortest.py"))
    assert float(percent) > 85
    assert (tmp_path / "output" / "objects" / "shortest" / "final_epoch" / "model.safetensors").exists()


@pytest.mark.exhaustive
def test_a_small_model_learns_from_a_larger_one(run: Callable[[str], str]) -> None:
    accuracies = {
        name: float(value) for name, value in re.findall(r"(\w+) {.*'accuracy': ([\d.]+)}", run("own_trainer.py"))
    }
    assert set(accuracies) == {"teacher", "student"}
    assert min(accuracies.values()) > 0.85


@pytest.mark.exhaustive
def test_a_callback_remembers_over_a_resume(run: Callable[[str], str], tmp_path: Path) -> None:
    lines = run("own_callback.py").splitlines()
    assert [line.partition(":")[0] for line in lines[:-1]] == [f"epoch {epoch}" for epoch in range(1, 11)]
    accuracies = [float(re.search(r"([\d.]+)%", line)[1]) for line in lines]
    assert accuracies[-2] > 85
    assert accuracies[-2] != accuracies[-1], "the means are put in for evaluations only"
    again = run("own_callback.py").splitlines()  # everything is done
    assert again == lines[-1:]


@pytest.mark.exhaustive
def test_a_killed_run_ends_as_one_that_was_not(run: Callable[[str], str]) -> None:
    lines = run("resume_after_kill.py").splitlines()
    began = [int(line.split()[4]) for line in lines if "starts after" in line]
    assert began[-1] == 0, "the run that was not killed"
    assert began[-2] >= 43, "the resumed one: from step 60, or from 43 if killed before 60 was made the last one"
    for promise in ("killed", "the same weights, bit for bit", "the same evaluation"):
        assert f"{promise}: True" in lines
