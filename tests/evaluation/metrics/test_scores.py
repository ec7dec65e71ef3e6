"""Whether scores are logits or probabilities is declared: no value of a batch decides it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sklearn.metrics as sk
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.evaluation.metrics.conftest import fed, rng
from tests.evaluation.metrics.test_tm_metrics import ARGUMENTS, PAIRS
from tests.toys import quiet
from trainwright import Trainer
from trainwright.base.errors import ConfigError
from trainwright.evaluation import MetricsHandler
from trainwright.evaluation.metrics.torchmetrics_factory import metric_classes

N, C = 60, 3
LOGITS = {
    "Binary": torch.randn(N, generator=rng(1)) * 2,
    "Multiclass": torch.randn(N, C, generator=rng(2)) * 2,
    "Multilabel": torch.randn(N, C, generator=rng(3)) * 2,
}
TARGETS = {
    "Binary": torch.randint(2, (N,), generator=rng(4)),
    "Multiclass": torch.randint(C, (N,), generator=rng(5)),
    "Multilabel": torch.randint(2, (N, C), generator=rng(6)),
}
for logits in LOGITS.values():  # the first batches lie within [0, 1], as probabilities do
    logits[:4] = logits[:4].abs().clamp(max=0.9)
    logits[4:8] = logits[4:8].clamp(0.1, 0.8)
CLASSIFICATIONS = [
    name for name in PAIRS
    if name.startswith(("Binary", "Multiclass", "Multilabel")) and not name.endswith("ExactMatch")
]  # fmt: skip


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=1e-6, equal_nan=True, check_dtype=False)


@pytest.mark.exhaustive(every=6)
@pytest.mark.parametrize("name", CLASSIFICATIONS)
def test_logits_give_the_value_of_their_probabilities_however_they_are_cut_into_batches(name: str) -> None:
    task = next(task for task in LOGITS if name.startswith(task))
    wide = LOGITS[task].double()
    expected = wide.softmax(1) if task == "Multiclass" else wide.sigmoid()
    sizes = {"Multiclass": {"num_classes": C}, "Multilabel": {"num_labels": C}}.get(task, {})
    arguments = {**ARGUMENTS.get(name.removeprefix(task), {}), **sizes}
    theirs = metric_classes()[name](**arguments)
    theirs.update(expected, TARGETS[task])
    for buffered in (True, False):
        ours = fed(
            name, LOGITS[task], TARGETS[task], (0, 4, 8, 30, N), from_logits=True, buffered=buffered, **arguments
        )
        close(ours.compute(), theirs.compute())


@pytest.mark.parametrize("name", ["AUROC", "AveragePrecision"])
@pytest.mark.parametrize("scale", [1.0, 30.0, 1e4])
def test_ranks_are_those_of_the_scores_where_a_sigmoid_would_be_one(name: str, scale: float) -> None:
    reference = {"AUROC": sk.roc_auc_score, "AveragePrecision": sk.average_precision_score}[name]
    scores, labels = 20 + scale * torch.rand(200, generator=rng(1)), torch.randint(2, (200,), generator=rng(2))
    scores[::7] = scores[3]  # equal ones stay equal
    expected = reference(labels, scores)
    for declared in (None, True):
        assert float(fed(name, scores, labels, (0, 50, 200), from_logits=declared).compute()) == pytest.approx(expected)
    two = torch.stack([scores, labels.new_zeros(200)], dim=1).flip(1)  # logits of two classes
    of_both = (expected + reference(1 - labels, -scores)) / 2
    assert float(fed(name, two, labels, (0, 50, 200), from_logits=True).compute()) == pytest.approx(of_both)
    many = torch.stack([scores, -scores], dim=1)  # two labels
    of_labels = (expected + reference(1 - labels, -scores)) / 2
    found = fed(name, many, torch.stack([labels, 1 - labels], dim=1), (0, 50, 200)).compute()
    assert float(found) == pytest.approx(of_labels)


def test_ranks_of_several_classes_are_those_of_exact_probabilities() -> None:
    """The reference computes in numbers of 64 bits of precision, where these probabilities differ from 1."""
    logits, labels = torch.randn(300, 3, generator=rng(1)) * 12, torch.randint(3, (300,), generator=rng(2))
    wide = logits.double().numpy().astype("longdouble")
    others = [sum(np.exp(wide[:, j] - wide[:, c]) for j in range(3) if j != c) for c in range(3)]
    expected = sum(sk.roc_auc_score(labels == c, -np.log(others[c]).astype(float)) for c in range(3)) / 3
    assert float(fed("AUROC", logits, labels, (0, 9, 300), from_logits=True).compute()) == pytest.approx(expected)


def test_probabilities_that_rounding_puts_above_one_stay_probabilities() -> None:
    scores, labels = torch.tensor([0.1, 0.2, 0.3, 1.0000001]), torch.tensor([0, 0, 0, 1])
    assert float(fed("Accuracy", scores, labels, (0, 4), from_logits=False).compute()) == 1.0


def test_one_score_that_is_not_a_number_leaves_the_others_as_they_are() -> None:
    scores, labels = torch.tensor([-2.0, -1.0, torch.nan, 3.0]), torch.tensor([0, 0, 1, 1])
    assert float(fed("Accuracy", scores, labels, (0, 4), from_logits=True).compute()) == 0.75


@pytest.mark.parametrize(
    ("name", "scores", "labels", "is_needed"),
    [
        ("Accuracy", LOGITS["Binary"], TARGETS["Binary"], True),
        ("F1Score", LOGITS["Multilabel"], TARGETS["Multilabel"], True),
        ("AUROC", LOGITS["Multiclass"], TARGETS["Multiclass"], True),
        ("CalibrationError", LOGITS["Multiclass"], TARGETS["Multiclass"], True),
        ("Accuracy", LOGITS["Multiclass"], TARGETS["Multiclass"], False),
        ("AUROC", LOGITS["Binary"], TARGETS["Binary"], False),
        ("AveragePrecision", LOGITS["Multilabel"], TARGETS["Multilabel"], False),
    ],
)
def test_logits_that_nothing_declares_are_an_error_where_probabilities_are_needed(
    name: str, scores: Tensor, labels: Tensor, is_needed: bool
) -> None:
    if not is_needed:
        assert 0 <= float(fed(name, scores, labels, (0, 30, N)).compute()) <= 1
        return
    with pytest.raises(ConfigError, match=rf"metric {name}: .*outside \[0, 1\].*from_logits"):
        fed(name, scores, labels, (0, 30, N)).compute()
    handler = MetricsHandler([name])
    handler.declare_scores(are_logits=True)
    value = next(iter(handler.compute_metrics(scores, labels).values()))
    assert value == pytest.approx(float(fed(name, scores, labels, (0, 30, N), from_logits=True).compute()))


class Scores(nn.Module):
    """Its scores are its inputs; ``wrap`` makes its output of them."""

    def __init__(self, wrap: Any = None) -> None:
        super().__init__()
        self.factor, self.wrap = nn.Parameter(torch.ones(1)), wrap

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        scores = x * self.factor
        return scores if self.wrap is None else self.wrap(scores, labels)


def by_bce(scores: Tensor, labels: Tensor) -> Any:
    return {"loss": F.binary_cross_entropy_with_logits(scores, labels), "logits": scores}


def by_own_loss(scores: Tensor, labels: Tensor) -> Any:
    return {"loss": F.binary_cross_entropy_with_logits(scores, labels), "prediction_scores": scores}


class Typed(Scores):
    loss_type = "ForSequenceClassification"


LOGIT = ({"name": "Accuracy", "from_logits": True}, {"name": "F1Score", "from_logits": True})
DECLARED: dict[str, tuple[Any, dict[str, Any], Any, bool]] = {
    "criterion": (Scores(), {"loss": "BCEWithLogitsLoss"}, None, False),
    "object": (Scores(), {}, nn.BCEWithLogitsLoss(), False),
    "function": (Scores(), {}, F.binary_cross_entropy_with_logits, False),
    "output by name": (Scores(by_bce), {}, None, True),
    "loss_type": (Typed(by_own_loss), {}, None, True),
    "setting": (Scores(by_own_loss), {"metrics": LOGIT}, None, True),
    "setting, own function": (Scores(), {"metrics": LOGIT}, lambda s, y: (s - y).square().mean(), False),
}


@pytest.mark.parametrize("case", DECLARED)
def test_a_run_declares_what_scores_are_in_training_and_evaluation(case: str, tmp_path: Path) -> None:
    model, settings, loss, is_named = DECLARED[case]
    scores, labels = LOGITS["Multilabel"], TARGETS["Multilabel"].float()
    data: Any = TensorDataset(scores, labels)
    if is_named:
        data = [{"x": row, "labels": label} for row, label in zip(scores, labels, strict=True)]
    given = {"metrics": ["Accuracy", "F1Score"], "lr": 1e-9, "num_epochs": 1, "batch_size": 4, "save_enabled": False}
    config = quiet(tmp_path, **{**given, "dataloader_shuffle": False, **settings})
    trainer = Trainer(model, config, data, data, loss=loss)
    results = trainer.train()
    expected = ((scores > 0) == labels.bool()).double().mean().item()
    assert results["accuracy"] == pytest.approx(expected)
    assert trainer.storage.latest()["accuracy"][0] == pytest.approx(expected)
    assert results["f1_score"] == pytest.approx(sk.f1_score(labels, scores > 0, average="macro"))


def test_scores_near_labels_of_a_squared_loss_are_compared_as_probabilities(tmp_path: Path) -> None:
    scores, labels = 0.5 + LOGITS["Binary"][:, None] / 4, TARGETS["Binary"].float()[:, None]
    data = TensorDataset(scores, labels)
    trainer = Trainer(Scores(), quiet(tmp_path, loss="MSELoss", metrics=["Accuracy"]), data, data)
    assert trainer.evaluate()["accuracy"] == pytest.approx(((scores > 0.5) == labels.bool()).double().mean().item())


class Focal(Scores):
    loss_type = "focal"  # of its own, and no name of transformers


def test_a_loss_type_of_the_users_own_declares_nothing(tmp_path: Path) -> None:
    scores, labels = LOGITS["Multilabel"].sigmoid(), TARGETS["Multilabel"].float()
    data = [{"x": row, "labels": label} for row, label in zip(scores, labels, strict=True)]
    trainer = Trainer(Focal(by_own_loss), quiet(tmp_path, metrics=["F1Score"], save_enabled=False), data, data)
    assert trainer.evaluate()["f1_score"] == pytest.approx(sk.f1_score(labels, scores > 0.5, average="macro"))


def test_a_run_without_a_declaration_ends_with_the_first_batch_that_needs_it(tmp_path: Path) -> None:
    scores, labels = LOGITS["Multilabel"][8:], TARGETS["Multilabel"][8:].float()
    data = [{"x": row, "labels": label} for row, label in zip(scores, labels, strict=True)]
    trainer = Trainer(Scores(by_own_loss), quiet(tmp_path, metrics=["F1Score"], save_enabled=False), data, data)
    with pytest.raises(ConfigError, match=r"F1Score.*from_logits"):
        trainer.train()
    assert trainer.state.global_step <= 1
    by_default = Trainer(Scores(by_own_loss), quiet(tmp_path, save_enabled=False, num_epochs=1), data, data)
    assert set(by_default.train()) == {"loss"}
