"""What is seen in the first updates."""

import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.inspect.check.seeded_bugs import config_files, objects
from trainwright import Trainer, TrainingConfig
from trainwright.inspect.check.copies import quiet
from trainwright.inspect.check.observed import NUM_UPDATES, SetUp


class Branches(nn.Module):
    """``unused`` is not called; ``zero`` has a gradient of 0."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused, self.zero = nn.Linear(4, 2), nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, inputs: Any) -> Any:
        return self.used(inputs) + 0 * self.zero(inputs)


def test_gradients_memory_and_times(tmp_path: Path) -> None:
    data = TensorDataset(torch.randn(64, 4), torch.randint(2, (64,)))
    config = TrainingConfig(output_dir=str(tmp_path / "run"), batch_size=8, num_epochs=2)
    trainer = Trainer(Branches(), config, data)
    with quiet():
        seen = SetUp(trainer.run, tmp_path, end=time.perf_counter() + 60).observed
    assert seen.with_gradient == {"used.weight", "used.bias"}
    assert seen.with_zero_gradient == {"zero.weight", "zero.bias"}
    assert seen.changed >= {"used.weight", "used.bias"}
    assert seen.num_steps == len(seen.seconds) == len(seen.losses) == NUM_UPDATES
    parameters = 3 * (4 * 2 + 2) * 4  # bytes
    moments = 2 * parameters * 2 / 3  # Adam's, not of what has no gradient
    assert seen.checkpoint_bytes >= parameters + moments
    assert seen.memory_bytes >= seen.checkpoint_bytes + parameters + 8 * 4 * 4  # gradients, inputs


def test_frozen_weights_that_were_trained_are_no_problem(tmp_path: Path) -> None:
    trainer = objects(tmp_path / "run", "frozen layer")
    with torch.no_grad():
        trainer.model[0].weight.copy_(torch.randn(64, 64) * 0.2)  # not what a Linear starts with
    finding = trainer.check(only=["parameters"])["parameters"]
    assert finding.result == "passed"
    assert "not trained: 2 (0.weight, 0.bias)" in finding.evidence


def test_a_frozen_layer_with_loaded_weights_in_config_files(tmp_path: Path, monkeypatch: Any) -> None:
    trainer = config_files(tmp_path / "run", "frozen layer")
    build = trainer.build_model

    def loaded(cfg: Any) -> nn.Module:
        model = build(cfg)
        nn.init.constant_(model[0].weight, 0.1)  # as weights from a file: equal for each seed
        nn.init.constant_(model[0].bias, 0.1)
        return model

    monkeypatch.setattr(type(trainer), "build_model", staticmethod(loaded))
    assert trainer.check(only=["parameters"])["parameters"].result == "passed"
