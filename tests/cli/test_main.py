"""The command line itself."""

import importlib
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

import trainwright
from trainwright.cli.commands import COMMANDS, module_of
from trainwright.cli.main import main


def test_help_is_printed_and_is_no_error(run_python, tmp_path: Path) -> None:
    for arguments in (["--help"], []):
        done = run_python("-m", "trainwright.cli.main", *arguments, cwd=tmp_path)
        assert "trainwright train config.py" in done.stdout
        assert "--resume" in done.stdout
        for name, text in COMMANDS.items():
            assert f"  {name} " in done.stdout
            assert text in done.stdout
        assert max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_has_a_parser_and_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = importlib.import_module(module_of(name)).parser()
    assert parser.prog == f"trainwright {name}"
    with suppress(SystemExit):
        assert main([name, "--help"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith(f"usage: trainwright {name} ")
    assert said.err == ""


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
        (["--versoin"], ["no option '--versoin'", "Did you mean '--version'?"]),
        (["train"], ["No configuration file", "trainwright train"]),
        (["train", "config.py", "--resum"], ["--resum", "--resume"]),
        (["train", "config.py", "-help"], ["-help", "'--help'"]),
        (["config.py"], ["config.py is a file: trainwright train config.py"]),
    ],
)
def test_a_wrong_command_exits_2_and_suggests_the_right_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments, facts
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        code = main(arguments)
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    for fact in facts:
        assert fact in said


def test_the_page_of_the_command_line_has_all_commands() -> None:
    page = (Path(trainwright.__file__).parents[1] / "docs" / "command-line.md").read_text(encoding="utf-8")
    table = "\n".join(line for line in page.splitlines() if line.startswith("| `"))
    assert [name for name in COMMANDS if f"`{name} " not in table and f"`{name}`" not in table] == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a disk without space")
def test_output_that_cannot_be_written_is_one_message(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "trainwright"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "No space left on device" in line


def test_a_reader_that_has_ended_is_no_message() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([sys.executable, "-m", "trainwright"], stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


def test_a_name_that_the_terminal_cannot_show_is_escaped(tmp_path: Path) -> None:
    (tmp_path / "é🔥").mkdir()
    command = [sys.executable, "-m", "trainwright", "runs", "é🔥"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "\\xe9\\U0001f525: no runs.\n")


NUMBERS = [
    ("check c.py --max-seconds 0", "got '0'; it must be a number above 0."),
    ("check c.py --max-seconds nan", "got 'nan'; it must be a number above 0."),
    ("doctor --port 65536", "got '65536'; it must be a whole number from 1 to 65535."),
    ("estimate c.py --world x", "got 'x'; it must be a whole number >= 1."),
    ("find lr c.py --lowest low", "got 'low'; it must be a number above 0."),
    ("find lr c.py --updates 19", "got '19'; it must be a whole number >= 20."),
    ("find batch-size c.py --max-size 0", "got '0'; it must be a whole number >= 1."),
    ("launch --max-restarts -1 train", "got '-1'; it must be a whole number >= 0."),
    ("predict run a.txt --batch-size 1.5", "got '1.5'; it must be a whole number >= 1."),
    ("replay run --step first", "got 'first'; it must be a whole number >= 1."),
    ("report run --port x", "got 'x'; it must be a whole number from 0 to 65535."),
]


@pytest.mark.parametrize(("line", "message"), NUMBERS, ids=[line for line, _ in NUMBERS])
def test_a_wrong_number(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(line.split())
    option = next(word for word in line.split() if word.startswith("--"))
    said = capsys.readouterr().err
    assert f"argument {option}" in said
    assert message in said
