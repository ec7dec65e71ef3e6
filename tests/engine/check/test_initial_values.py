"""Frozen parameters are a problem if they have random values."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.engine.check.seeded_bugs import config_files, objects
from trainwright.engine.check.initial_values import same_distribution


@pytest.mark.parametrize("seed", range(5))
def test_two_samples_of_one_distribution(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    first, second = (torch.rand(400, generator=generator) for _ in range(2))
    assert same_distribution(first, second)
    assert not same_distribution(first, second**2)


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
