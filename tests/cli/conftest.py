"""A short run of the example project, made once for all tests that only look at it."""

import hashlib
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.config.conftest import trust_as_at_the_start as trust_as_at_the_start  # of the tests in this process

# 60 updates with everything in them: four checkpoints (three kept), three evaluations, six rows.
SHORT = (
    "train.train_epoch=0",
    "train.train_iter=60",
    "train.checkpointer.period=15",
    "train.eval_period=20",
    "train.log_period=10",
)


@dataclass(frozen=True)
class FinishedRun:
    folder: Path
    config: Path
    done: "subprocess.CompletedProcess[str]"


@pytest.fixture(scope="session")
def short() -> tuple[str, ...]:
    return SHORT


@pytest.fixture(scope="session")
def config(mnist_project: Path) -> Path:
    return mnist_project / "configs" / "config.py"


@pytest.fixture(scope="session")
def finished(
    config: Path, train: Callable[..., "subprocess.CompletedProcess[str]"], tmp_path_factory: pytest.TempPathFactory
) -> FinishedRun:
    """Nobody writes into its folder: copy it first."""
    folder = tmp_path_factory.mktemp("finished") / "output"
    done = train(config, *SHORT, f"train.output_dir={folder}", cwd=folder.parent)
    return FinishedRun(folder, config, done)


@pytest.fixture(scope="session")
def sha() -> Callable[[Path], str]:
    """Of the weights in a checkpoint folder."""
    return lambda folder: hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


@pytest.fixture(scope="session")
def contents() -> Callable[[Path], dict[str, bytes | str]]:
    """Every file of a folder byte for byte, and where its links point."""

    def read(folder: Path) -> dict[str, bytes | str]:
        return {
            str(path.relative_to(folder)): str(path.readlink()) if path.is_symlink() else path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.is_symlink() or path.is_file()
        }

    return read
