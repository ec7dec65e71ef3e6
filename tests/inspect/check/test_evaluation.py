"""Evaluations that are not neutral; labels that cannot be judged."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from tests.inspect.check.test_steps import one_finding, other
from trainwright import Trainer, TrainingConfig


class Changing(Trainer):
    def evaluate(self, *arguments: Any, **named: Any) -> Any:
        with torch.no_grad():
            self.model[0].bias.mul_(0.5)
        return super().evaluate(*arguments, **named)


class InTraining(Trainer):
    def evaluate(self, *arguments: Any, **named: Any) -> Any:
        self.model.train()
        for inputs, _ in self.eval_dataloader:
            self.model(inputs)
        return {"loss": 1.0}


class Attention(nn.Module):
    """Attention whose dropout does not know the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 10)

    def forward(self, inputs: Any) -> Any:
        x = inputs.view(-1, 1, 8, 8)
        return self.head(F.scaled_dot_product_attention(x, x, x, dropout_p=0.1).mean((1, 2)))


@pytest.mark.parametrize(
    ("kind", "model", "fact"),
    [
        (Changing, None, "changes 1 tensors of the model (first 0.bias)"),
        (InTraining, nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10)), "statistics of a batch"),
        (InTraining, None, "draws from the random generators"),
        (Trainer, Attention(), "active dropout of the attention"),
    ],
)
def test_an_evaluation_that_is_not_neutral(kind: Any, model: Any, fact: str, tmp_path: Path) -> None:
    finding = one_finding(other(kind, tmp_path, model), "evaluation")
    assert finding.result == "problem"
    assert fact in finding.evidence


@pytest.mark.exhaustive
@pytest.mark.slow
def test_labels_of_noise_are_undecided_or_a_problem_of_the_data(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.rand(300, 64, generator=generator), torch.randint(2, (300,), generator=generator))
    config = TrainingConfig(output_dir=str(tmp_path / "run"), batch_size=30, learning_rate=1e-4)
    finding = one_finding(Trainer(nn.Linear(64, 2), config, data), "labels")
    assert finding.result == "undecided"  # it cannot learn them by heart


def test_few_samples_are_not_judged(tmp_path: Path) -> None:
    data = TensorDataset(torch.rand(90, 64), torch.randint(2, (90,)))
    config = TrainingConfig(output_dir=str(tmp_path / "run"), batch_size=30)
    finding = one_finding(Trainer(nn.Linear(64, 2), config, data), "labels")
    assert (finding.result, finding.evidence) == ("skipped", "30 samples are too few to compare.")
