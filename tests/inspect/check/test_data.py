"""Samples of an epoch, common samples, workers: what is deliberate or by chance is no problem."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset, WeightedRandomSampler

from tests.inspect.check.test_steps import one_finding
from tests.toys import Samples
from trainwright import Trainer, TrainingConfig

DATA = TensorDataset(torch.rand(200, 4, generator=torch.Generator().manual_seed(0)), torch.arange(200) % 2)


def trainer(folder: Path, train: Any = DATA, evaluated: Any = None, **settings: Any) -> Trainer:
    config = TrainingConfig(output_dir=str(folder / "run"), batch_size=30, num_epochs=3, **settings)
    name = "train_dataloader" if isinstance(train, DataLoader) else "train_dataset"
    return Trainer(nn.Linear(4, 2), config, eval_dataset=evaluated, **{name: train})


class Order:
    def __init__(self, *indices: int) -> None:
        self.indices = indices

    def __iter__(self) -> Any:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)


@pytest.mark.parametrize(
    ("order", "result", "fact"),
    [
        (range(200), "passed", "200 samples, each once per epoch"),
        (range(1, 200), "problem", "1 of 200 samples are never read"),
        (Order(*range(200), 0), "problem", "1 of 200 samples are read more often"),
        (WeightedRandomSampler(torch.ones(200), 200), "passed", "as configured"),
    ],
)
def test_the_samples_of_an_epoch(order: Any, result: str, fact: str, tmp_path: Path) -> None:
    finding = one_finding(trainer(tmp_path, DataLoader(DATA, batch_size=20, sampler=order)), "samples")
    assert finding.result == result
    assert fact in finding.evidence


@pytest.mark.parametrize(
    ("data", "result", "fact"),
    [
        (TensorDataset(DATA[:][0][:1].expand(200, 4), DATA[:][1]), "problem", "inputs of all 200 samples"),
        (
            TensorDataset(DATA[:][0], torch.ones(200, dtype=torch.long)),
            "problem",
            "All 200 samples that were read have the same",
        ),
        (TensorDataset(DATA[:][0], (torch.arange(200) == 170).long()), "passed", ""),
    ],
)
def test_samples_or_labels_that_are_all_equal(data: Any, result: str, fact: str, tmp_path: Path) -> None:
    finding = one_finding(trainer(tmp_path, data, dataloader_drop_last=False), "samples")
    assert finding.result == result
    assert fact in finding.evidence


@pytest.mark.parametrize("drop", [True, False])
def test_a_remainder_that_is_dropped_is_no_problem(drop: bool, tmp_path: Path) -> None:
    finding = one_finding(trainer(tmp_path, dataloader_drop_last=drop), "samples")
    assert finding.result == "passed"
    assert ("the last 20 of each epoch are dropped" in finding.evidence) is drop


def test_parts_of_one_data_set_are_compared_by_index(tmp_path: Path) -> None:
    first = trainer(tmp_path, Subset(DATA, range(150)), Subset(DATA, range(150, 200)))
    assert one_finding(first, "test_data").result == "passed"
    second = trainer(tmp_path, Subset(DATA, range(160)), Subset(DATA, range(150, 200)))
    assert "10 of 50 samples" in one_finding(second, "test_data").evidence


def test_natural_duplicates_are_no_problem(tmp_path: Path) -> None:
    coins = TensorDataset(torch.arange(200).view(-1, 1).expand(-1, 4) % 8 / 8, torch.arange(200) % 2)
    finding = one_finding(trainer(tmp_path, coins, TensorDataset(*coins[:50])), "test_data")
    assert finding.result == "passed"
    assert "have duplicates, too" in finding.evidence


def noisy(source: str) -> Samples:
    own = np.random.default_rng(0)
    draw = {"own": lambda: own.random(4), "numpy": lambda: np.random.rand(4), "none": lambda: np.ones(4)}[source]
    return Samples(lambda index: torch.as_tensor(draw(), dtype=torch.float32), lambda index: index % 2, length=64)


@pytest.mark.exhaustive(every=3)
@pytest.mark.parametrize(("source", "result"), [("own", "problem"), ("numpy", "passed"), ("none", "passed")])
def test_workers_of_a_plain_loader(source: str, result: str, tmp_path: Path) -> None:
    loader = DataLoader(noisy(source), batch_size=8, num_workers=2)
    assert one_finding(trainer(tmp_path, loader), "workers").result == result
