"""``trainwright replay`` runs an update again."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trainwright.cli.main import main


def files_of(folder: Path) -> list[Path]:
    """All files but the compiled modules, which the first import of the project by any test writes."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)


def test_an_update_of_a_finished_run(finished: Any, run_python: Any, mnist_project: Path) -> None:
    before = files_of(mnist_project)
    done = run_python("-m", "trainwright.cli.main", "replay", finished.folder, "--step", 52, cwd=mnist_project)
    lines = done.stdout.splitlines()
    assert lines[0] == "Update 52, from checkpoint model_0000044"
    assert lines[1].startswith("Loss: ")
    assert lines[1].endswith(", equal by bits to that of the run")
    assert lines[2] == "All values of the step are finite."
    assert "Samples with the largest losses, of 32" in lines
    assert "Gradient norms of the layers, before clipping" in lines
    assert done.stderr == ""
    assert files_of(mnist_project) == before


@pytest.mark.exhaustive
@pytest.mark.parametrize("typed", ["c", "q"])
def test_break_stops_in_the_users_code(
    typed: str, finished: Any, environment: dict[str, str], mnist_project: Path
) -> None:
    arguments = ["replay", str(finished.folder), "--step", "2", "--break", "--json"]
    command = [sys.executable, "-m", "trainwright.cli.main", *arguments]
    how: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 120}
    done = subprocess.run(command, cwd=mnist_project, env=environment, input=f"{typed}\n", **how)
    stop, _, found = done.stdout.partition("(Pdb) ")
    assert "modeling/model.py" in stop
    assert "forward()" in stop
    if typed == "q":  # leaving the debugger ends the command
        assert (done.returncode, done.stderr.splitlines()) == (-signal.SIGINT, ["Interrupted."])
        return
    assert done.returncode == 0, done.stderr
    facts = json.loads(found)
    assert facts["loss"] == facts["recorded_loss"]
    assert len(facts["samples"][0]) == 32


@pytest.mark.parametrize(
    ("files", "facts"),
    [
        (["training_config.yaml"], ["Python API", "trainer.replay(3)"]),
        ([], ["no config.yaml", "output folder of a run"]),
    ],
)
def test_a_run_that_the_command_cannot_build(
    files: list[str], facts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in files:
        (tmp_path / name).touch()
    assert main(["replay", str(tmp_path), "--step", "3"]) == 2
    said = capsys.readouterr().err
    for fact in facts:
        assert fact in said
