"""``trainwright new``: a project that trains, is evaluated and passes its test as it is, in both flavours."""

import json
import re
from pathlib import Path

import pytest

from trainwright.cli.main import main


@pytest.mark.parametrize("api", ["config", "python"])
@pytest.mark.exhaustive
def test_a_new_project_trains_and_is_evaluated_by_the_commands_of_its_readme(
    api: str, run_python, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    name = f"my-{api}-project"
    assert main(["new", name, "--api", api]) == 0
    project = tmp_path / name
    readme = (project / "README.md").read_text()
    assert capsys.readouterr().out.splitlines()[-1].strip() in readme
    done = run_python("-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=project)
    assert "1 passed" in done.stdout
    commands = re.findall(r"^(?:trainwright|python train.py).*", readme, re.MULTILINE)
    commands = [command.partition("#")[0].split() for command in commands if "optim.lr" not in command]
    assert len(commands) == 3
    for command in commands:
        words = ["-m", "trainwright.cli.main", *command[1:]] if command[0] == "trainwright" else command[1:]
        done = run_python(*words, cwd=project)
    accuracy = float(re.findall(r"(?:Acc@1|accuracy) +([0-9.]+)", done.stdout)[-1])
    assert accuracy > (95 if api == "config" else 0.95)
    assert json.loads((project / "output" / name / "metrics.json").read_text().splitlines()[0])


def test_the_docstring_of_the_model_says_which_loss_counts(tmp_path: Path) -> None:
    assert main(["new", str(tmp_path / "mine"), "--api", "config"]) == 0
    text = (tmp_path / "mine" / "mine" / "model.py").read_text()
    assert 'The output "loss" is minimized, other losses are only logged.' in text


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("mine", "link"):
        assert main(["new", str(tmp_path / name)]) == 2
        assert "exists already" in capsys.readouterr().err
    assert not list((tmp_path / "mine").iterdir())
    assert main(["new", str(tmp_path / "no" / "folder")]) == 2
    assert "there is no folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "fact"),
    [
        ("torch", "my-torch"),
        ("json", "hide"),
        ("class", "a word of Python"),
        ("1st", "begins with a letter"),
        ("a b", "letters of English"),
        ("größe", "letters of English"),
        ("tests", "hide"),
    ],
)
def test_names_that_would_not_work(tmp_path: Path, name: str, fact: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", str(tmp_path / name)]) == 2
    assert fact in capsys.readouterr().err
    assert not (tmp_path / name).exists()


def test_an_unknown_api_lists_both(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["new", "project", "--api", "yaml"])
    assert stopped.value.code == 2
    assert "python" in capsys.readouterr().err
