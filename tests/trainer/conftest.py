"""A small model and 40 samples, which are five batches, for tests of the Python API."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.toys import pairs, quiet
from trainwright import Trainer, TrainingConfig
from trainwright.checkpoint import Checkpointer

PAIRS = pairs(40)
INPUTS, LABELS = PAIRS.tensors


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))


def config(folder: Path, **settings: Any) -> TrainingConfig:
    # Subclasses stop a run that others continue.
    given = {"learning_rate": 0.01, "tensorboard": {}, "allow_other_trainer": True}
    return quiet(folder, **{**given, **settings})


class Scripted(Trainer):
    """Evaluations give these, one after the other."""

    losses = (3.0, 1.0, 2.0, 1.5)

    def evaluate(self, dataset: Any = None) -> dict[str, Any]:  # type: ignore[override]
        loss = self.losses[self.state.global_step // 5 - 1]
        return {"loss": loss, "score": -loss, "cer": loss / 10}


def weights(path: Path) -> dict[str, Any]:
    model = make()
    Checkpointer(model).load(path, checkpointables=[], strict=True)
    return model.state_dict()


def equal(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


def events_in(folder: Path) -> set[str]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return set(events.Tags()["scalars"])
