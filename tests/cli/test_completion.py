"""Completion in a shell: what argcomplete answers for a line, and in bash itself."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from trainwright.cli.main import main

# Answers are written to a file, as the code of the shells asks for.
ANSWER = """
import os
os.environ |= {"_ARGCOMPLETE": "1", "COMP_LINE": %(line)r, "COMP_POINT": str(len(%(line)r)), "COMP_TYPE": "9"}
os.environ |= {"_ARGCOMPLETE_IFS": "\\n", "_ARGCOMPLETE_STDOUT_FILENAME": "answers"}
from trainwright.cli.main import main
main([])
"""


@pytest.fixture
def completions(run_python, tmp_path: Path) -> Callable[[str], set[str]]:
    pytest.importorskip("argcomplete")

    def ask(line: str) -> set[str]:
        run_python("-c", ANSWER % {"line": f"trainwright {line}"}, cwd=tmp_path, code=None)
        return {word.strip() for word in (tmp_path / "answers").read_text().split("\n")}

    return ask


def test_commands_options_files_and_settings(completions: Callable[[str], set[str]], tmp_path: Path) -> None:
    (tmp_path / "confidence.py").touch()
    assert completions("ch") == {"check", "checkpoint"}
    assert {"--sort", "--state"} <= completions("runs --s")
    assert {"--sweep", "--sampler"} <= completions("train --s")
    assert completions("checkpoint ver") == {"verify"}
    assert completions("train conf") == {"confidence.py"}
    found = completions("train confidence.py train.lo")
    names = ("log_period", "log_throughput", "load_weight", "load_best_model_at_end", "loss_ignores")
    assert found == {f"train.{name}=" for name in names}
    assert "train.evaluation.eval_period=" in completions("train confidence.py train.evaluation.")


@pytest.mark.exhaustive
def test_checkpoints_of_the_run(completions: Callable[[str], set[str]], finished) -> None:
    assert {"model_best", "model_final"} <= completions(f"eval {finished.folder} --checkpoint ")


BASH = """
eval "$(trainwright completion bash)"
COMP_LINE="trainwright checkpoint li"; COMP_POINT=${#COMP_LINE}; COMP_TYPE=9
function=$(complete -p trainwright | sed 's/.*-F \\([^ ]*\\).*/\\1/')
$function trainwright li checkpoint
echo "${COMPREPLY[*]}"
"""
FISH = 'trainwright completion fish | source; complete -C "trainwright checkpoint li"'


@pytest.mark.parametrize(("shell", "script"), [("bash", BASH), ("fish", FISH)], ids=["bash", "fish"])
def test_a_shell_reads_the_code_and_completes(
    shell: str, script: str, tmp_path: Path, environment: dict[str, str]
) -> None:
    pytest.importorskip("argcomplete")
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    program = tmp_path / "trainwright"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m trainwright "$@"\n')
    program.chmod(0o755)
    found = {**environment, "PATH": f"{tmp_path}:{environment['PATH']}", "HOME": str(tmp_path)}
    done = subprocess.run([shell, "-c", script], env=found, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["list"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_code_of_each_shell(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("argcomplete")
    assert main(["completion", shell]) == 0
    assert "trainwright" in capsys.readouterr().out


def test_without_argcomplete_the_command_to_install_it_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "argcomplete", None)
    assert main(["completion", "bash"]) == 2
    assert "pip install argcomplete" in capsys.readouterr().err
