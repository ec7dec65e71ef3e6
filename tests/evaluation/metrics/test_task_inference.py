"""The task of a classification metric is inferred from the first batch; scikit-learn is the reference."""

import numpy as np
import pytest
import sklearn.metrics as sk
import torch

from tests.evaluation.metrics.conftest import (
    BINARY,
    CLASSES,
    CUTS,
    FOUND,
    LABEL_SCORES,
    LABELS,
    LOGITS,
    SCORES,
    C,
    N,
    fed,
    rng,
)
from trainwright.base.errors import ConfigError
from trainwright.evaluation import EvaluationError, TMMetrics
from trainwright.evaluation.metrics.tm_metrics import _log_binary, _warn_of_dimension


@pytest.mark.parametrize("cuts", [(0, N), CUTS], ids=["one batch", "uneven batches"])
@pytest.mark.parametrize(
    ("name", "arguments", "predictions", "targets", "expected"),
    [
        ("Accuracy", {}, LOGITS, CLASSES, sk.accuracy_score(CLASSES, FOUND)),
        ("Accuracy", {}, LOGITS.softmax(1), CLASSES, sk.accuracy_score(CLASSES, FOUND)),
        ("Accuracy", {}, FOUND, CLASSES, sk.accuracy_score(CLASSES, FOUND)),
        ("Accuracy", {}, LOGITS[:, :2], BINARY, sk.accuracy_score(BINARY, LOGITS[:, :2].argmax(1))),
        ("Accuracy", {}, SCORES, BINARY, sk.accuracy_score(BINARY, SCORES > 0.5)),
        ("Accuracy", {}, SCORES, BINARY.float(), sk.accuracy_score(BINARY, SCORES > 0.5)),
        ("Accuracy", {}, SCORES[:, None], BINARY[:, None].float(), sk.accuracy_score(BINARY, SCORES > 0.5)),
        ("Accuracy", {}, SCORES[:, None], BINARY, sk.accuracy_score(BINARY, SCORES > 0.5)),
        ("Accuracy", {}, LOGITS, CLASSES[:, None], sk.accuracy_score(CLASSES, FOUND)),
        ("Accuracy", {}, LOGITS, CLASSES.to(torch.uint8), sk.accuracy_score(CLASSES, FOUND)),
        ("Accuracy", {"top_k": 2}, LOGITS, CLASSES, sk.top_k_accuracy_score(CLASSES, LOGITS, k=2)),
        ("Accuracy", {}, LABEL_SCORES, LABELS.float(), ((LABEL_SCORES > 0.5) == LABELS).float().mean()),
        ("F1Score", {"average": "macro"}, LOGITS, CLASSES, sk.f1_score(CLASSES, FOUND, average="macro")),
        ("F1", {"average": "macro"}, FOUND, CLASSES, sk.f1_score(CLASSES, FOUND, average="macro")),
        ("F1Score", {}, LOGITS, CLASSES, sk.f1_score(CLASSES, FOUND, average="macro")),
        ("Precision", {}, FOUND, CLASSES, sk.precision_score(CLASSES, FOUND, average="macro")),
        ("recall", {}, LOGITS, CLASSES, sk.recall_score(CLASSES, FOUND, average="macro")),
        ("F1", {"average": "micro"}, LOGITS, CLASSES, sk.f1_score(CLASSES, FOUND, average="micro")),
        ("f1_score", {}, SCORES, BINARY, sk.f1_score(BINARY, SCORES > 0.5)),
        ("F1Score", {}, (SCORES > 0.5).long(), BINARY, sk.f1_score(BINARY, SCORES > 0.5)),
        (
            "F1Score",
            {"average": "macro"},
            LABEL_SCORES,
            LABELS,
            sk.f1_score(LABELS, LABEL_SCORES > 0.5, average="macro"),
        ),
        ("F1", {}, LABEL_SCORES, LABELS, sk.f1_score(LABELS, LABEL_SCORES > 0.5, average="macro")),
        ("recall", {}, LABEL_SCORES, LABELS, sk.recall_score(LABELS, LABEL_SCORES > 0.5, average="macro")),
        (
            "f1",
            {"average": "binary", "from_logits": True},
            LOGITS[:, :2],
            BINARY,
            sk.f1_score(BINARY, LOGITS[:, :2].argmax(1)),
        ),
        (
            "Recall",
            {"task": "binary"},
            LOGITS[:, :2].softmax(1),
            BINARY,
            sk.recall_score(BINARY, LOGITS[:, :2].argmax(1)),
        ),
        ("f1", {"average": "binary"}, SCORES, BINARY, sk.f1_score(BINARY, SCORES > 0.5)),
        (
            "AUROC",
            {"task": "binary", "from_logits": True},
            LOGITS[:, :2],
            BINARY,
            sk.roc_auc_score(BINARY, LOGITS[:, 1] - LOGITS[:, 0]),
        ),
        ("Precision", {"average": "macro"}, LOGITS, CLASSES, sk.precision_score(CLASSES, FOUND, average="macro")),
        ("Recall", {"average": "weighted"}, LOGITS, CLASSES, sk.recall_score(CLASSES, FOUND, average="weighted")),
        ("AUROC", {}, SCORES, BINARY, sk.roc_auc_score(BINARY, SCORES)),
        (
            "AUROC",
            {"from_logits": True},
            LOGITS,
            CLASSES,
            sk.roc_auc_score(CLASSES, LOGITS.softmax(1).double(), multi_class="ovr"),
        ),
        ("MatthewsCorrcoef", {}, LOGITS, CLASSES, sk.matthews_corrcoef(CLASSES, FOUND)),
        ("CohenKappa", {}, FOUND, CLASSES, sk.cohen_kappa_score(CLASSES, FOUND)),
        ("IoU", {}, LOGITS, CLASSES, sk.jaccard_score(CLASSES, FOUND, average="macro")),
        ("ConfusionMatrix", {}, LOGITS, CLASSES, sk.confusion_matrix(CLASSES, FOUND)),
        ("MulticlassF1Score", {}, LOGITS, CLASSES, sk.f1_score(CLASSES, FOUND, average="macro")),
        ("MultilabelF1Score", {}, LABEL_SCORES, LABELS, sk.f1_score(LABELS, LABEL_SCORES > 0.5, average="macro")),
        ("MeanSquaredError", {}, SCORES, LOGITS[:, 0], sk.mean_squared_error(LOGITS[:, 0], SCORES)),
        ("MeanSquaredError", {}, SCORES[:, None], LOGITS[:, 0], sk.mean_squared_error(LOGITS[:, 0], SCORES)),
        ("MeanAbsoluteError", {}, SCORES, CLASSES, sk.mean_absolute_error(CLASSES, SCORES)),
        ("R2Score", {}, SCORES, LOGITS[:, 0], sk.r2_score(LOGITS[:, 0], SCORES)),
        ("PearsonCorrcoef", {}, SCORES, LOGITS[:, 0], np.corrcoef(SCORES, LOGITS[:, 0])[0, 1]),
    ],
)
def test_the_task_is_inferred_from_the_first_batch(name, arguments, predictions, targets, expected, cuts):
    value = fed(name, predictions, targets, cuts, **arguments).compute()
    torch.testing.assert_close(value.double(), torch.as_tensor(expected).double(), rtol=1e-5, atol=1e-6)


def test_a_metric_of_two_classes_names_more_and_undeclared_scores():
    with pytest.raises(EvaluationError, match=rf"takes scores of two classes.* are of {C}: leave it out"):
        fed("F1Score", LOGITS.softmax(1), CLASSES, task="binary")
    with pytest.raises(ConfigError, match="from_logits=True"):
        fed("AUROC", LOGITS[:, :2], BINARY, task="binary")
    with pytest.raises(ConfigError, match=r"average='binary' and task='multiclass'\. Leave one"):
        fed("F1Score", LOGITS[:, :2], BINARY, average="binary", task="multiclass")


def test_tokens_may_have_their_classes_last_or_in_the_middle():
    scores, targets = torch.randn(6, 7, C, generator=rng()), torch.randint(C, (6, 7), generator=rng(1))
    expected = (scores.argmax(-1) == targets).float().mean()
    for predictions in (scores, scores.transpose(1, 2)):
        assert fed("Accuracy", predictions, targets, (0, 2, 6)).compute() == expected


@pytest.mark.parametrize("lengths", [(7, C, 3), (C, 7, 3), (C, C, 3)])
def test_another_batch_shows_how_classes_lie_where_one_has_as_many_tokens_as_classes(lengths):
    metric, right, total = TMMetrics("Accuracy"), 0, 0
    for length in lengths:
        scores, targets = (
            torch.randn(4, length, C, generator=rng(length)),
            torch.randint(C, (4, length), generator=rng()),
        )
        metric.update(scores, targets)
        right, total = right + int((scores.argmax(-1) == targets).sum()), total + targets.numel()
        saved = metric.state_dict()
        metric = metric.fresh()
        metric.load_state_dict(saved)
    assert float(metric.compute()) == pytest.approx(right / total)


def test_as_many_tokens_as_classes_are_taken_as_losses_of_torch_take_them_with_a_warning(caplog):
    scores, targets = torch.randn(4, C, C, generator=rng()), torch.randint(C, (4, C), generator=rng(1))
    _warn_of_dimension.cache_clear()
    assert fed("Accuracy", scores, targets, (0, 4)).compute() == (scores.argmax(1) == targets).float().mean()
    assert f"scores (4, {C}, {C}) float32 may be in dimension 1 or the last" in caplog.text


@pytest.mark.parametrize("is_last", [True, False])
def test_where_classes_lie_is_declared_where_the_shape_fits_both(is_last, caplog):
    scores, targets = torch.randn(4, C, C, generator=rng()), torch.randint(C, (4, C), generator=rng(1))
    _warn_of_dimension.cache_clear()
    metric = TMMetrics("Accuracy")
    metric.declare_scores(are_logits=True, is_classes_last=is_last)
    metric = metric.fresh()
    metric.update(scores, targets)
    found = scores.argmax(-1 if is_last else 1)
    assert metric.compute() == (found == targets).float().mean()
    assert caplog.text == ""


def test_class_indices_that_are_0_and_1_only_are_two_classes_which_is_logged(caplog):
    caplog.set_level("INFO")
    _log_binary.cache_clear()
    found, labels = torch.tensor([0, 1, 1, 0]), torch.tensor([0, 0, 1, 1])
    fed("F1Score", torch.cat([found, torch.tensor([2])]), torch.cat([labels, torch.tensor([2])]), (0, 2, 5)).compute()
    assert "two classes" not in caplog.text
    value = fed("F1Score", found, labels, (0, 2, 4)).compute()
    assert float(value) == pytest.approx(sk.f1_score(labels, found))
    assert "metric F1Score: all class indices are 0 or 1" in caplog.text


@pytest.mark.parametrize(
    ("name", "predictions", "targets", "message"),
    [
        ("Accuracy", torch.randn(8, 3), torch.randn(8, 2), r"\(8, 3\) float32.*\(8, 2\) float32.*Classification takes"),
        ("Accuracy", torch.randn(8), torch.randn(8), r"have fractions.*MeanSquaredError"),
        ("MeanSquaredError", torch.randn(8, 3), torch.randn(8), r"\(8, 3\) float32 and targets \(8,\) float32"),
        ("Accuracy", torch.randn(8, 3), torch.full((8,), 7), "targets hold class 7; there are 3"),
        ("AUROC", torch.arange(8) % 3, torch.arange(8) % 3, "metric AUROC"),
        ("Accuracy", ["a"], ["b"], r"of 1 entries \(list\).*task="),
    ],
)
def test_what_does_not_fit_is_an_error_at_the_first_batch(name, predictions, targets, message):
    with pytest.raises(EvaluationError, match=message):
        TMMetrics(name).update(predictions, targets)
