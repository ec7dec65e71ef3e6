"""The loss of each sample: that of the model, of a loss of torch, or computed from scores and labels."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainwright.evaluation.sample_losses import LossesOfTorch, losses_of_samples

GENERATOR = torch.Generator().manual_seed(0)
SCORES, LABELS = torch.randn(6, 4, generator=GENERATOR), torch.arange(6) % 4


@pytest.mark.parametrize(
    ("criterion", "labels"),
    [
        (nn.CrossEntropyLoss(), LABELS),
        (nn.CrossEntropyLoss(label_smoothing=0.1), LABELS),
        (nn.BCEWithLogitsLoss(), F.one_hot(LABELS, 4).float()),
        (nn.SmoothL1Loss(), F.one_hot(LABELS, 4).float()),
    ],
)
def test_a_loss_of_torch_without_reduction(criterion: nn.Module, labels: Tensor) -> None:
    found: list[Any] = []
    with LossesOfTorch(lambda: 6, found.append):
        mean = criterion(SCORES, labels)
    (losses,) = found
    assert torch.equal(mean, criterion(SCORES, labels))
    expected = torch.stack([criterion(SCORES[n : n + 1], labels[n : n + 1]) for n in range(6)])
    assert torch.allclose(losses, expected)


def test_of_token_losses_the_mean_over_the_labels_that_count() -> None:
    scores, labels = torch.randn(2, 3, 5, generator=GENERATOR), torch.tensor([[1, 2, -100], [0, -100, -100]])
    found: list[Any] = []
    with LossesOfTorch(lambda: 2, found.append):
        F.cross_entropy(scores.flatten(0, 1), labels.flatten())
    expected = [F.cross_entropy(one, label) for one, label in zip(scores, labels, strict=True)]
    assert torch.allclose(found[0], torch.stack(expected))
    # Several losses of one batch are added.
    found = losses_of_samples({}, None, 6, [SCORES[:, 0], None, SCORES[:, 1]])
    assert found is not None
    assert torch.equal(found, SCORES[:, 0] + SCORES[:, 1])


@pytest.mark.parametrize(
    ("batch", "outputs", "expected"),
    [
        ((SCORES, LABELS), SCORES, F.cross_entropy(SCORES, LABELS, reduction="none")),
        ({"labels": LABELS}, {"prediction_scores": SCORES}, F.cross_entropy(SCORES, LABELS, reduction="none")),
        ({"labels": LABELS.float()}, {"scores": SCORES[:, 0]}, (SCORES[:, 0] - LABELS).square()),
        ({}, {"sample_losses": SCORES[:, 1]}, SCORES[:, 1]),
        ({"labels": LABELS}, {"loss": torch.tensor(1.0)}, None),
        ({"labels": LABELS[:3]}, {"scores": SCORES}, None),
        (SCORES, SCORES, None),
    ],
)
def test_from_outputs_and_labels(batch: Any, outputs: Any, expected: Tensor | None) -> None:
    found = losses_of_samples(batch, outputs, 6, [])
    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        assert torch.allclose(found, expected)
