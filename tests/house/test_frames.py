"""How many frames of ours lie between ``train()`` and the model's ``forward``."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

import trainwright
from tests.toys import file_config, points, quiet
from trainwright import DefaultTrainer, Trainer

PACKAGE = str(Path(trainwright.__file__).parent)
FRAMES: list[list[str]] = []


class Model(nn.Module):
    """Notes, in each call, which functions of ours called it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        frame, ours = sys._getframe(1), []
        while frame is not None:
            if frame.f_code.co_filename.startswith(PACKAGE):
                ours.append(frame.f_code.co_name)
            frame = frame.f_back
        FRAMES.append(ours[::-1])
        return {"loss": F.cross_entropy(self.blocks(inputs), labels)}


def config(folder: Path, **train: Any) -> Any:
    return file_config(folder, Model, points, train_iter=3, train_micro_batch_size=4, **train)


def frames_of(trainer: Any) -> list[str]:
    FRAMES.clear()
    trainer.train()
    assert len(FRAMES) >= 3
    first, *later = FRAMES
    assert all(frames == later[0] for frames in later)
    assert len(first) <= len(later[0]) + 1  # the first step of the Python API chooses the others
    return later[0]


@pytest.mark.exhaustive(every=2)
@pytest.mark.parametrize(
    "train",
    [
        {},
        {"num_accumulation_steps": 2},
        {"amp": {"enabled": True}},
        {"activation_checkpoint": {"enabled": True}},
    ],
    ids=["plain", "accumulation", "amp", "recompute"],
)
def test_config_files_have_three_frames(tmp_path: Path, train: dict[str, Any]) -> None:
    assert frames_of(DefaultTrainer(config(tmp_path, **train))) == ["train", "run", "train_micro_batch"]


class CallsBase(DefaultTrainer):
    def run_step(self) -> None:
        self._trainer.run_step(self.get_batch, self.device)


class CallsSuper(DefaultTrainer):
    def run_step(self) -> None:
        super().run_step()


@pytest.mark.parametrize("kind", [CallsBase, CallsSuper])
def test_a_users_own_run_step_adds_one_call_beside_the_users(kind: type[DefaultTrainer], tmp_path: Path) -> None:
    assert frames_of(kind(config(tmp_path))) == ["train", "run_step", "run", "train_micro_batch"]


def test_the_python_api_has_four_frames(tmp_path: Path) -> None:
    trainer = Trainer(Model(), quiet(tmp_path, num_epochs=1, batch_size=4), train_dataset=points())
    assert frames_of(trainer) == ["train", "run", "_train", "compute_loss"]
