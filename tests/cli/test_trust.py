"""What a command is given is data: no code of a hostile run folder, or beside it, runs without ``--trust-folder``."""

import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from trainwright.cli.commands import COMMANDS
from trainwright.config.lazy.allowlist import use_project
from trainwright.engine.folder.record import git_state

Run = Callable[..., "subprocess.CompletedProcess[str]"]

MODULE = """
import torch
from torch import nn
class Rows(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, index): return {"x": torch.full((4,), float(index)), "labels": torch.tensor(index % 2)}
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)
    def forward(self, x, labels):
        scores = self.layer(x)
        return {"loss": nn.functional.cross_entropy(scores, labels), "prediction_scores": scores}
"""
CONFIG = """
from own_of_run import Net, Rows
from trainwright import LazyCall, get_config
from trainwright.data import build_image_test_loader, build_image_train_loader
model = LazyCall(Net)()
dataloader = dict(
    train=LazyCall(build_image_train_loader)(dataset=LazyCall(Rows)(), num_workers=0),
    test=[LazyCall(build_image_test_loader)(dataset=LazyCall(Rows)(), num_workers=0)],
)
optim = get_config("common/optim.py").optim
train = get_config("common/train.py").train
train.update(output_dir="../run", train_iter=4, log_period=2, train_micro_batch_size=4, input_placement_device="cpu")
train.checkpointer.period = 2
train.evaluation.evaluator.topk = (1,)
"""
# Optional packages of torch and of this library, and modules that Python itself imports.
SHADOWS = ("pynvml", "triton", "wandb", "mlflow", "json", "urllib", "yaml", "matplotlib", "plotly", "argcomplete")

# What each command is given. RUN: the folder; CHECKPOINT: one in it; FILE: one of the user's; OUT: a new name.
BUILDS = {  # builds what the configuration names, and so has to refuse it
    "train": [f"RUN/config.yaml {options}" for options in ("train.output_dir=OUT", "--resume", "--eval-only --resume")],
    "launch": ["-n 1 eval RUN"],
    "eval": ["RUN", "CHECKPOINT", "RUN/config.yaml --checkpoint model_final"],
    "check": ["RUN/config.yaml --max-seconds 5"],
    "find": ["lr RUN/config.yaml --updates 20", "batch-size RUN/config.yaml --max-size 4"],
    "estimate": ["RUN/config.yaml", "RUN/config.yaml --world 2 --memory 1GiB"],
    "replay": ["RUN --step 3"],
}
READS = {
    "predict": ["RUN FILE", "RUN FILE --import own_of_run", "CHECKPOINT FILE"],
    "config": ["show RUN", "show RUN --yaml", "diff RUN RUN/config.yaml"],
    "runs": ["RUN", "RUN --show train.seed --where train.seed=1234"],
    "report": ["RUN -o OUT", "RUN", "RUN --png"],
    "diff": ["RUN RUN"],
    "checkpoint": ["list RUN", "show CHECKPOINT", "verify RUN --deep", "export CHECKPOINT --output OUT"],
    "doctor": [""],
}
NOT_GIVEN_A_RUN = {"new", "completion"}


@dataclass(frozen=True)
class Archive:
    """A project folder with an unpacked archive: a run, and code in it, in its checkpoints and beside it."""

    project: Path
    marker: Path  # written by each module of the archive

    @property
    def run(self) -> Path:
        return self.project / "archive" / "run"

    def arguments(self, text: str) -> list[str]:
        checkpoint = self.run / "checkpoints" / "model_final"
        project = self.project
        places = {"RUN": self.run, "CHECKPOINT": checkpoint, "FILE": project / "a.txt", "OUT": project / "out"}
        for name, path in places.items():
            text = text.replace(name, str(path))
        return text.split()


@pytest.fixture(scope="module")
def trained(run_python: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    (folder / "src").mkdir()
    (folder / "src" / "own_of_run.py").write_text(MODULE)
    (folder / "src" / "config.py").write_text(CONFIG)
    run_python("-m", "trainwright", "train", "config.py", cwd=folder / "src")
    return folder / "run"


@pytest.fixture
def archive(trained: Path, tmp_path: Path) -> Archive:
    found = Archive(tmp_path / "project", tmp_path / "ran")
    shutil.copytree(trained, found.run, symlinks=True)
    shutil.copytree(found.run / "model_final", found.run / "checkpoints" / "model_final")
    (found.run.parent / "code").mkdir()
    (found.project / "a.txt").write_text("a text\n")
    evil = f"import sys\nwith open({str(found.marker)!r}, 'a') as file: print(__file__, sys.argv, file=file)\n"
    for folder in ("run", "run/checkpoints", "run/checkpoints/model_final", "code"):
        folder = found.run.parent / folder
        (folder / "own_of_run.py").write_text(evil + MODULE)
        for name in SHADOWS:
            (folder / f"{name}.py").write_text(evil)
    return found


def is_expected(done: "subprocess.CompletedProcess[str]", name: str) -> bool:
    if name in BUILDS:
        return done.returncode != 0 and "--trust-folder" in done.stderr
    return done.returncode == 0 or (name == "predict" and done.returncode == 2)


PLACES = {  # the working folder, and how the configuration names the module: lines before it, and its path
    "run": ("", "own_of_run."),
    "run/checkpoints": ("project_root: .\n", "own_of_run."),
    "run/checkpoints/model_final": ("project_root: ../code\n", "own_of_run."),
    "..": ("project_root: ../code\n", "own_of_run."),
    "../.": ("", "archive.code.own_of_run."),
}
COMMAND_LINES = [(name, text) for group in (BUILDS, READS) for name, texts in group.items() for text in texts]


def test_each_command_that_is_given_a_run_has_cases() -> None:
    assert {*BUILDS, *READS} | NOT_GIVEN_A_RUN == {*COMMANDS}


@pytest.mark.exhaustive(every=4)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("name", "text"), COMMAND_LINES, ids=[f"{name} {text}" for name, text in COMMAND_LINES])
def test_no_code_of_a_given_run_is_run(archive: Archive, run_python: Run, name: str, text: str, place: str) -> None:
    config, (first, module) = archive.run / "config.yaml", PLACES[place]
    lines = config.read_text().replace("own_of_run.", module).splitlines(keepends=True)
    config.write_text("".join([first, *(line for line in lines if not line.startswith("project_root"))]))
    assert f"{module}Net" in config.read_text()
    done = run_python("-m", "trainwright", name, *archive.arguments(text), cwd=archive.run.parent / place, code=None)
    assert not archive.marker.exists(), archive.marker.read_text()
    assert is_expected(done, name), f"{done.returncode} {done.stdout} {done.stderr}"
    if name in BUILDS and "../code" in first:
        assert f"the file says: {archive.run.parent / 'code'}" in done.stderr


@pytest.mark.parametrize("command", ["checkpoint export CHECKPOINT --output OUT", "launch -n 1 eval RUN"])
def test_no_file_in_the_folder_of_a_run_is_taken_for_a_module_of_python_or_torch(
    archive: Archive, run_python: Run, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.delitem(environment, "PYTHON_EXEC", raising=False)  # processes that have imported nothing
    run_python("-m", "trainwright", *archive.arguments(command), cwd=archive.run / "checkpoints", code=None, fresh=True)
    assert not archive.marker.exists(), archive.marker.read_text()


def test_the_code_is_run_if_the_user_trusts_it(archive: Archive, run_python: Run) -> None:
    run_python("-m", "trainwright", "eval", archive.run, "--trust-folder", cwd=archive.run)
    assert "own_of_run.py" in archive.marker.read_text()


def test_predict_imports_a_module_of_the_working_folder_unless_that_is_the_models(
    archive: Archive, run_python: Run
) -> None:
    (archive.run / "model_config.yaml").write_text("name: a_model_of_their_own\n")
    for folder in (archive.project, archive.run, archive.run / "checkpoints"):
        (folder / "registers.py").write_text("print('imported')")
        arguments = archive.arguments("RUN FILE --import registers")
        done = run_python("-m", "trainwright", "predict", *arguments, cwd=folder, code=2)
        assert ("imported" in done.stderr) == (folder == archive.project), done.stderr


def test_a_report_replaces_a_link_in_the_folder_of_the_run(archive: Archive, run_python: Run) -> None:
    (archive.run / "report.html").symlink_to(archive.project / "a.txt")
    run_python("-m", "trainwright", "report", archive.run, cwd=archive.project)
    assert (archive.project / "a.txt").read_text() == "a text\n"
    assert not (archive.run / "report.html").is_symlink()


def test_git_is_not_asked_about_a_repository_that_is_data(
    archive: Archive, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The settings of a repository name programs, which `git status` starts."""
    program = tmp_path / "program.sh"
    program.write_text(f"#!/bin/sh\ntouch {archive.marker}\n")
    program.chmod(0o755)
    for command in (["init", "-q"], ["config", "core.fsmonitor", str(program)], ["add", "config.yaml"]):
        subprocess.run(["git", "-C", archive.run, *command], check=True, capture_output=True)
    archive.marker.unlink(missing_ok=True)
    monkeypatch.chdir(archive.run)
    git_state.cache_clear()
    use_project("config.yaml")
    assert git_state(str(archive.run)) is None
    assert git_state(str(archive.run / "checkpoints")) is None
    assert not archive.marker.exists()
