"""The command line itself."""

from pathlib import Path

import pytest

import trainwright


def test_help_is_printed_and_is_no_error(run_python, tmp_path: Path) -> None:
    for arguments in (["--help"], []):
        done = run_python("-m", "trainwright.cli.main", *arguments, cwd=tmp_path)
        assert "trainwright train CONFIG" in done.stdout
        assert "--resume" in done.stdout


def test_the_package_runs_the_command_line(run_python, tmp_path: Path) -> None:
    done = run_python("-m", "trainwright", "train", cwd=tmp_path, code=2)
    assert "No configuration file" in done.stderr


def test_the_help_of_train_names_every_flag(train, tmp_path: Path) -> None:
    said = train("--help", cwd=tmp_path).stdout
    for flag in ("--config-file", "--resume", "--eval-only", "--fast-dev-run", "--allow-module", "--traceback"):
        assert flag in said
    assert "optim.lr=1e-3" in said


def test_the_version_is_printed(run_python, tmp_path: Path) -> None:
    done = run_python("-m", "trainwright.cli.main", "--version", cwd=tmp_path)
    assert done.stdout == f"trainwright {trainwright.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        (["trian", "config.py"], ["'trian'", "Did you mean 'train'?"]),
        (["lunch", "train"], ["'lunch'", "Did you mean 'launch'?"]),
        (["train"], ["No configuration file", "trainwright train"]),
        (["train", "config.py", "--resum"], ["--resum", "--resume"]),
    ],
)
def test_a_wrong_command_exits_2_and_suggests_the_right_one(run_python, tmp_path: Path, arguments, facts) -> None:
    done = run_python("-m", "trainwright.cli.main", *arguments, cwd=tmp_path, code=2)
    assert "Traceback" not in done.stderr
    for fact in facts:
        assert fact in done.stderr
