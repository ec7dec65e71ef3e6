"""Losses that are no mean, divisions of the user's own, and resumes that are not exact."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.inspect.check.test_steps import one_finding, other
from trainwright import Trainer


class Summed(Trainer):
    def compute_loss(self, model: Any, inputs: Any) -> Any:
        return F.cross_entropy(model(inputs[0]), inputs[1], reduction="sum")


def test_a_sum_over_the_samples(tmp_path: Path) -> None:
    finding = one_finding(other(Summed, tmp_path), "loss_scale")
    assert finding.result == "problem"
    assert "a sum over the samples" in finding.evidence


class Divided(Trainer):
    def compute_loss(self, model: Any, inputs: Any) -> Any:
        return F.cross_entropy(model(inputs[0]), inputs[1]) / self.config.gradient_accumulation_steps


def test_a_division_by_the_accumulated_batches(tmp_path: Path) -> None:
    trainer = other(Divided, tmp_path, settings={"gradient_accumulation_steps": 4})
    finding = one_finding(trainer, "loss_scale")
    assert (finding.result, finding.values["factor"]) == ("problem", pytest.approx(0.25, rel=1e-5))
    assert "Remove the division" in finding.suggestion


class Undivided(Trainer):
    """Accumulates itself, and forgets to divide."""

    def train_step(self, model: Any, inputs: Any) -> Any:
        loss = F.cross_entropy(model(inputs[0]), inputs[1])
        loss.backward()
        if self.run.update.is_window_end:
            self.optimizer.step()
            self.optimizer.zero_grad()
        return {"step_loss": loss.detach()}


@pytest.mark.parametrize(("kind", "result"), [(Trainer, "passed"), (Undivided, "problem")])
def test_accumulation(kind: type[Trainer], result: str, tmp_path: Path) -> None:
    finding = one_finding(other(kind, tmp_path, settings={"gradient_accumulation_steps": 4}), "accumulation")
    assert finding.result == result
    assert finding.values["ratio"] == pytest.approx(1 if result == "passed" else 4, rel=1e-3)


def test_accumulation_with_batch_normalization_is_not_compared(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.Linear(32, 10))
    trainer = other(Trainer, tmp_path, model, settings={"gradient_accumulation_steps": 2})
    assert one_finding(trainer, "accumulation").result == "skipped"


def test_a_state_that_is_not_saved(tmp_path: Path) -> None:
    class Growing(Trainer):
        calls = 0

        def compute_loss(self, model: Any, inputs: Any) -> Any:
            self.calls += torch.is_grad_enabled()
            return F.cross_entropy(model(inputs[0]), inputs[1]) * (1 + 0.1 * self.calls)

    finding = one_finding(other(Growing, tmp_path), "resume")
    assert finding.result == "problem"
    assert "state_dict" in finding.suggestion


def test_runs_that_differ_anyway_are_undecided(tmp_path: Path) -> None:
    source = torch.Generator().manual_seed(0)  # of the program: not restored by anything

    class Noisy(Trainer):
        def compute_loss(self, model: Any, inputs: Any) -> Any:
            return F.cross_entropy(model(inputs[0]), inputs[1]) * torch.rand((), generator=source)

    assert one_finding(other(Noisy, tmp_path), "resume").result == "undecided"
