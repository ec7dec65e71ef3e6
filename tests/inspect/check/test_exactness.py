"""Losses that are no mean, divisions of the user's own, and resumes that are not exact."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from tests.inspect.check.seeded_bugs import digits
from tests.inspect.check.test_steps import one_finding, other
from trainwright import Trainer, TrainingConfig
from trainwright.data import ColumnDataset


class Summed(Trainer):
    def compute_loss(self, model: Any, inputs: Any) -> Any:
        return F.cross_entropy(model(inputs[0]), inputs[1], reduction="sum")


@pytest.mark.parametrize(
    ("last", "loss", "fact"),
    [
        (nn.Softmax(1), "CrossEntropyLoss", "probabilities (rows sum to 1)"),
        (nn.Softmax(1), "NLLLoss", "NLLLoss takes logarithms"),
        (nn.LogSoftmax(1), "NLLLoss", None),
        (nn.LogSoftmax(1), "CrossEntropyLoss", None),
        (nn.Identity(), "NLLLoss", "NLLLoss takes logarithms"),
        (nn.Sigmoid(), "CrossEntropyLoss", None),
        (nn.Linear(10, 10), "CrossEntropyLoss", None),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_scores_that_are_not_what_the_loss_takes(last: Any, loss: str, fact: str | None, tmp_path: Path) -> None:
    trainer = other(Trainer, tmp_path, nn.Sequential(nn.Linear(64, 10), last), settings={"loss": loss})
    finding = one_finding(trainer, "loss_scale")
    assert finding.result == ("passed" if fact is None else "problem")
    assert (fact or "") in finding.evidence


@pytest.mark.parametrize("scale", [0.0, 0.01, 1.0])
def test_a_model_that_returns_its_loss_and_probabilities_is_right(scale: float, tmp_path: Path) -> None:
    class Net(nn.Linear):
        def forward(self, images: Any, labels: Any) -> Any:
            scores = scale * super().forward(images)
            return {"loss": F.cross_entropy(scores, labels), "prediction_scores": scores.softmax(1)}

    images, labels = digits(slice(200))
    config = TrainingConfig(output_dir=str(tmp_path), batch_size=16)
    trainer = Trainer(Net(64, 10), config, ColumnDataset(images=images, labels=labels))
    assert one_finding(trainer, "loss_scale").result == "passed"


@pytest.mark.parametrize(("last", "result"), [(nn.Sigmoid(), "problem"), (nn.Hardtanh(0, 1), "passed")])
def test_a_sigmoid_before_a_loss_of_logits(last: Any, result: str, tmp_path: Path) -> None:
    images, labels = digits(slice(200), labels=lambda labels: (labels > 4).float())
    model = nn.Sequential(nn.Linear(64, 1), last, nn.Flatten(0))
    config = TrainingConfig(output_dir=str(tmp_path), loss="BCEWithLogitsLoss", batch_size=16)
    assert one_finding(Trainer(model, config, TensorDataset(images, labels)), "loss_scale").result == result


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


class TokenLoss(nn.Module):
    """Scores of tokens, and a loss whose mean is over what ``kind`` says, without the labels ``ignored``."""

    def __init__(self, kind: str, ignored: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.ignored = kind, ignored
        self.layers = nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 12))

    def forward(self, ids: Any, labels: Any) -> Any:
        scores, labels = self.layers(ids).transpose(1, 2), labels
        if self.kind == "next":
            scores, labels = scores[..., :-1], labels[:, 1:]
        each = F.cross_entropy(scores, labels, reduction="none", ignore_index=self.ignored)
        number = (labels != self.ignored).sum(1)
        return {"loss": (each.sum(1) / number).mean() if self.kind == "samples" else each.sum() / number.sum()}


@pytest.mark.parametrize(
    ("kind", "ignored", "fact", "fix", "declared"),
    [
        ("labels", 3, "the labels that are not 3", "loss_ignores=3", {"loss_ignores": 3}),
        ("samples", -100, "the samples", "loss_ignores=None", {"loss_ignores": None}),
        ("next", -100, "the labels of the next tokens", "loss_type = 'ForCausalLM'", {}),
    ],
)
def test_accumulation_names_what_to_declare(
    kind: str, ignored: int, fact: str, fix: str, declared: dict[str, Any], tmp_path: Path
) -> None:
    ids = torch.randint(4, 12, (64, 9), generator=torch.Generator().manual_seed(0))
    lengths = torch.arange(64) // 8 + 2  # of texts: the labels behind them are ignored
    texts = ColumnDataset(ids=ids, labels=torch.where(torch.arange(9) < lengths[:, None], ids, ignored))

    def finding(model: nn.Module, **settings: Any) -> Any:
        settings |= {"batch_size": 8, "gradient_accumulation_steps": 4, "dataloader_shuffle": False}
        return one_finding(Trainer(model, TrainingConfig(output_dir=str(tmp_path), **settings), texts), "accumulation")

    found = finding(TokenLoss(kind, ignored))
    assert (found.result, fact in found.evidence, fix in found.suggestion) == ("problem", True, True)
    model: Any = TokenLoss(kind, ignored)
    if kind == "next":
        model.loss_type = "ForCausalLM"
    assert finding(model, **declared).result == "passed"


class Growing(Trainer):
    calls = 0

    def compute_loss(self, model: Any, inputs: Any) -> Any:
        self.calls += torch.is_grad_enabled()
        return F.cross_entropy(model(inputs[0]), inputs[1]) * (1 + 0.1 * self.calls)


class Noisy(Trainer):
    source = torch.Generator().manual_seed(0)  # of the program: not restored by anything

    def compute_loss(self, model: Any, inputs: Any) -> Any:
        return F.cross_entropy(model(inputs[0]), inputs[1]) * torch.rand((), generator=self.source)


class Unscaled(Trainer):
    def compute_loss(self, model: Any, inputs: Any) -> Any:
        return F.cross_entropy(model(1000 * inputs[0]), inputs[1])


NORM = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.Linear(32, 10))


@pytest.mark.parametrize(
    ("kind", "options", "check", "result", "fact"),
    [
        (Summed, {}, "loss_scale", "problem", "a sum over the samples"),
        (Unscaled, {}, "loss_scale", "problem", "that of equal scores is 2.3"),
        (Trainer, {"model": NORM, "settings": {"gradient_accumulation_steps": 2}}, "accumulation", "skipped", ""),
        (Growing, {}, "resume", "problem", "state_dict"),
        (Noisy, {}, "resume", "undecided", ""),
    ],
    ids=["a sum", "inputs that are not scaled", "batch normalization", "a state that is not saved", "runs that differ"],
)
def test_one_fault(
    kind: type[Trainer], options: dict[str, Any], check: str, result: str, fact: str, tmp_path: Path
) -> None:
    finding = one_finding(other(kind, tmp_path, **options), check)
    assert finding.result == result
    assert fact in finding.evidence + finding.suggestion
