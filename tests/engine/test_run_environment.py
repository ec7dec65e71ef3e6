"""Versions, git and machine of a run."""

import os
import platform
import subprocess
from pathlib import Path

import pytest
import torch

from trainwright.engine.run_environment import git_state, machine, numerics, versions, working_folder


def git(folder: Path, *arguments: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    return subprocess.run(
        ["git", "-C", str(folder), *who, *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


def test_the_state_of_a_repository(tmp_path: Path) -> None:
    git(tmp_path, "init", "-b", "work")
    (tmp_path / "a file.py").write_text("a = 1\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "first")
    (tmp_path / "inside").mkdir()
    clean = git_state(str(tmp_path / "inside"))
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert clean == {"commit": commit, "branch": "work", "changed": [], "num_changed": 0, "diff": None}
    (tmp_path / "a file.py").write_text("a = 2\n")
    git_state.cache_clear()
    changed = git_state(str(tmp_path))
    assert changed is not None
    assert (changed["changed"], changed["num_changed"]) == (["a file.py"], 1)
    assert len(changed["diff"]) == 16


def test_no_repository_and_no_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert git_state(str(tmp_path / "nowhere")) is None
    assert git_state("") is None
    (tmp_path / ".git").mkdir()
    assert git_state(str(tmp_path)) is None  # not a repository
    git_state.cache_clear()
    monkeypatch.setenv("PATH", "")
    assert git_state(str(tmp_path)) is None


def test_a_deleted_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    assert working_folder() == ""


def test_versions_and_machine() -> None:
    assert versions()["torch"] == torch.__version__
    assert versions()["python"] == platform.python_version()
    found = machine()
    assert found["cpus"] >= 1
    assert found["memory_bytes"] is None or found["memory_bytes"] > 1e8
    assert found["host"] == platform.node()
    assert numerics()["threads"] == torch.get_num_threads()
    assert os.sep not in found["processor"][:1]
