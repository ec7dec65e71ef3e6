"""TMMetrics: the value does not depend on how the data is cut into batches; states are saved and continued."""

import json
from itertools import pairwise

import pytest
import sklearn.metrics as sk
import torch
import torchmetrics

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
from trainwright.checkpoint.state_files import decode_state, encode_state
from trainwright.evaluation import EvaluationError, TMMetrics
from trainwright.evaluation.metrics.tm_metrics import MAX_BATCHES
from trainwright.evaluation.metrics.torchmetrics_factory import metric_classes


def test_labels_of_minus_100_do_not_count():
    targets = CLASSES.clone()
    targets[::3] = -100
    kept = targets != -100
    assert float(fed("Accuracy", LOGITS, targets).compute()) == pytest.approx(
        sk.accuracy_score(targets[kept], FOUND[kept])
    )
    assert float(fed("Accuracy", FOUND, targets).compute()) == pytest.approx(
        sk.accuracy_score(targets[kept], FOUND[kept])
    )


def test_perplexity_leaves_out_labels_of_minus_100() -> None:
    scores_BLC, labels_BL = torch.randn(4, 5, 150, generator=rng()), torch.randint(150, (4, 5), generator=rng(1))
    labels_BL[:, 3:] = -100
    mean = torch.nn.functional.cross_entropy(scores_BLC.flatten(0, 1), labels_BL.flatten())
    assert float(fed("Perplexity", scores_BLC, labels_BL).compute()) == pytest.approx(float(mean.exp()), rel=1e-5)
    labels_BL[labels_BL == -100] = 7  # a class that the user names
    metric = TMMetrics("Perplexity", ignore_index=7)
    metric.update(scores_BLC, labels_BL)
    assert float(metric.compute()) == pytest.approx(float(mean.exp()), rel=1e-5)


@pytest.mark.parametrize("name", ["MeanSquaredError", "MeanAbsoluteError", "MeanAbsolutePercentageError", "Accuracy"])
def test_a_view_is_counted_as_its_copy(name):
    found, true = torch.rand(4, 3, 2, generator=rng()), torch.rand(4, 3, 2, generator=rng(1)) + 1
    if name == "Accuracy":
        true = torch.randint(3, (4, 2))
    view = found.transpose(1, 2).contiguous().transpose(1, 2)
    assert not view.is_contiguous()
    values = [fed(name, one, true, (0, 2, 4)).compute() for one in (view, found)]
    assert torch.equal(*values)


def test_a_class_that_comes_late_is_counted_among_class_indices():
    found, true = torch.tensor([0, 1, 0, 1, 7]), torch.tensor([0, 1, 1, 1, 7])
    metric = TMMetrics("F1Score", average="macro")
    metric.update(found[:2], true[:2])
    assert metric.compute() == 1
    metric.update(found[2:], true[2:])
    assert float(metric.compute()) == pytest.approx(sk.f1_score(true, found, average="macro"))
    # Scores within 0 and 1 are logits where a setting says so.
    scores, targets = torch.tensor([0.1, 0.4, 0.9]), torch.tensor([1, 1, 1])
    assert fed("Accuracy", scores, targets, (0, 3)).compute() == pytest.approx(1 / 3)
    assert fed("Accuracy", scores, targets, (0, 3), from_logits=True).compute() == 1


def test_half_precision_is_summed_in_full():
    predictions, targets = (torch.rand(4096, generator=rng(seed)).bfloat16() for seed in (0, 1))
    value = fed("MeanSquaredError", predictions, targets, range(0, 4097, 16)).compute()
    assert float(value) == pytest.approx(sk.mean_squared_error(targets.double(), predictions.double()), rel=1e-5)


def test_a_wrong_batch_among_right_ones_is_found():
    metric = TMMetrics("Accuracy")
    metric.update(LOGITS, CLASSES)
    metric.update(LOGITS, CLASSES[:-1])
    with pytest.raises(EvaluationError, match=r"\(90, 5\) float32 and targets \(89,\) int64"):
        metric.compute()
    # Two wrong batches do not make a right one.
    metric = fed("Accuracy", LOGITS, CLASSES)
    metric.update(LOGITS[:10], CLASSES[:9])
    metric.update(LOGITS[:9], CLASSES[:10])
    with pytest.raises(EvaluationError, match=r"\(10, 5\) float32 and targets \(9,\) int64"):
        metric.compute()


def test_no_samples_are_an_error():
    for name in ("Accuracy", "MeanSquaredError"):
        with pytest.raises(EvaluationError, match=f"metric {name} has seen no samples"):
            TMMetrics(name).compute()
    metric = fed("MeanSquaredError", SCORES, SCORES)
    metric.reset()
    with pytest.raises(EvaluationError, match="no samples"):
        metric.compute()
    # Fresh ones are made alike and empty.
    metric = fed("F1Score", LOGITS, CLASSES, average="macro")
    other = metric.fresh()
    assert repr(other) == repr(metric)
    with pytest.raises(EvaluationError, match="no samples"):
        other.compute()


ARGUMENTS = {
    "RecallAtFixedPrecision": {"min_precision": 0.5},
    "PrecisionAtFixedRecall": {"min_recall": 0.5},
    "SensitivityAtSpecificity": {"min_specificity": 0.5},
    "SpecificityAtSensitivity": {"min_sensitivity": 0.5},
    "FBetaScore": {"beta": 0.5},
    "MinkowskiDistance": {"p": 3},
    "CriticalSuccessIndex": {"threshold": 0.5},
}
NOT_IN_PAIRS = ("Fairness", "GroupStatRates", "ContinuousRankedProbabilityScore")  # further inputs, or other shapes
PAIRS = sorted(
    name
    for name, kind in metric_classes().items()
    if kind.__module__.startswith(("torchmetrics.classification", "torchmetrics.regression"))
    and not name.endswith(NOT_IN_PAIRS)
)


def inputs_for(name):
    if not metric_classes()[name].__module__.startswith("torchmetrics.classification"):
        if name in ("KLDivergence", "JensenShannonDivergence", "CosineSimilarity"):
            return LOGITS.softmax(1), LOGITS.flip(0).softmax(1)
        return SCORES + 0.1, LOGITS[:, 0].exp()
    if name.startswith("Multilabel"):
        return LABEL_SCORES, LABELS
    if name.startswith("Binary"):
        return SCORES, BINARY
    if name.endswith("ExactMatch"):
        return torch.randint(2, (N, 3), generator=rng(8)), torch.randint(2, (N, 3), generator=rng(9))
    return LOGITS, CLASSES


@pytest.mark.exhaustive(every=8)
@pytest.mark.parametrize("name", PAIRS)
def test_updating_with_many_batches_at_once_gives_what_updating_with_each_gives(name):
    predictions, targets = inputs_for(name)
    base = name.removeprefix("Binary").removeprefix("Multiclass").removeprefix("Multilabel")
    arguments = {**ARGUMENTS.get(base, {}), **({"from_logits": True} if predictions is LOGITS else {})}
    if name.endswith("ExactMatch") and not name.startswith("Multilabel"):
        arguments |= {"num_classes": 2} | ({"task": "multiclass"} if name == "ExactMatch" else {})
    cuts = range(0, N + 1, 10)
    together = fed(name, predictions, targets, cuts, **arguments)
    each = fed(name, predictions, targets, cuts, buffered=False, **arguments)
    assert len(together._buffer) == len(cuts) - 2
    assert len(each._buffer) == 0
    # Counts are equal; sums of floats differ by the order of their terms: a few float32 roundings.
    torch.testing.assert_close(together.compute(), each.compute(), rtol=2e-5, atol=1e-6, equal_nan=True)


def test_the_buffer_is_bounded():
    metric = TMMetrics("Accuracy")
    for _ in range(2 * MAX_BATCHES + 2):
        metric.update(LOGITS, CLASSES)
        assert len(metric._buffer) < MAX_BATCHES
    large = torch.randn(64, 3000, generator=rng())
    for _ in range(20):
        metric = TMMetrics("MeanSquaredError")
        metric.update(large[:1], large[:1])
        metric.update(large, large)  # counted at once, not copied
        assert len(metric._buffer) == 0


@pytest.mark.parametrize("name", ["Accuracy", "MeanSquaredError"])
def test_tensors_may_be_written_to_after_the_update(name):
    predictions, targets = (SCORES, BINARY) if name == "Accuracy" else (SCORES, LOGITS[:, 0])
    reused, target, metric = torch.empty(30), torch.empty(30, dtype=targets.dtype), TMMetrics(name)
    for start in (0, 30, 60):
        reused.copy_(predictions[start : start + 30])
        target.copy_(targets[start : start + 30])
        metric.update(reused, target)
    torch.testing.assert_close(metric.compute(), fed(name, predictions, targets).compute())


def test_gradients_are_not_kept():
    weight = torch.ones(C, requires_grad=True)
    metric = TMMetrics("MeanSquaredError")
    for _ in range(3):
        metric.update(LOGITS * weight, LOGITS)
    assert not metric.compute().requires_grad
    assert not any(value.requires_grad for pair in metric._buffer for value in pair)


@pytest.mark.parametrize(
    ("name", "predictions", "targets", "arguments"),
    [
        ("Accuracy", LOGITS, CLASSES, {}),
        ("F1Score", FOUND, CLASSES, {"average": "macro"}),
        ("AUROC", SCORES, BINARY, {}),
        ("PearsonCorrCoef", SCORES, LOGITS[:, 0], {}),
        ("MinMaxMetric", LOGITS, CLASSES, {"base_metric": "Accuracy"}),
        ("RunningMean", SCORES, None, {"window": 3}),
    ],
)
@pytest.mark.parametrize("cut", [1, 3, 5])
def test_a_state_continues_exactly(name, predictions, targets, arguments, cut):
    def feed(metric, cuts):
        for start, stop in pairwise(cuts):
            rest = () if targets is None else (targets[start:stop],)
            metric.update(predictions[start:stop], *rest)
        return metric

    whole = feed(TMMetrics(name, **arguments), CUTS)
    first = feed(TMMetrics(name, **arguments), CUTS[: cut + 1])
    text, tensors = encode_state(first.state_dict(), "metric")  # the way into a checkpoint: JSON and tensors
    json.loads(text)
    second = TMMetrics(name, **arguments)
    second.load_state_dict(decode_state(text, tensors, "metric"))
    assert str(feed(second, CUTS[cut:]).compute()) == str(whole.compute())


def test_a_state_is_a_copy_and_only_for_the_same_metric():
    metric = fed("Accuracy", LOGITS, CLASSES)
    state = metric.state_dict()
    value = metric.compute()
    metric.update(LOGITS, (CLASSES + 1) % C)
    again = TMMetrics("Accuracy")
    again.load_state_dict(state)
    assert again.compute() == value
    with pytest.raises(ConfigError, match="saved state is of Accuracy"):
        TMMetrics("F1Score").load_state_dict(state)


def test_other_inputs_go_to_torchmetrics_as_they_are():
    metric = TMMetrics("WER")
    metric.update(["a b c"], ["a b d"])
    assert float(metric.compute()) == pytest.approx(1 / 3)
    retrieval = TMMetrics("RetrievalMAP")
    retrieval.update(torch.tensor([0.2, 0.9, 0.4]), torch.tensor([0, 1, 1]), indexes=torch.tensor([0, 0, 1]))
    assert retrieval.compute() == 1
    mean = TMMetrics("MeanMetric")
    mean.update(torch.tensor([1.0, 3.0]))
    assert mean.compute() == 2
    area = TMMetrics("AUC")
    area.update(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 1.0]))
    area.update(torch.tensor([2.0]), torch.tensor([3.0]))
    assert area.compute() == 3


def test_permutation_invariant_training_takes_a_function_by_its_name():
    metric = TMMetrics("PIT", metric_func="scale_invariant_signal_noise_ratio", eval_func="max")
    one, two = torch.randn(2, 2, 50, generator=rng()), torch.randn(2, 2, 50, generator=rng(1))
    metric.update(one, two)
    expected = torchmetrics.functional.audio.permutation_invariant_training(
        one, two, torchmetrics.functional.audio.scale_invariant_signal_noise_ratio, eval_func="max"
    )[0].mean()
    assert metric.compute() == pytest.approx(float(expected))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_of_mixed_precision_are_counted_in_full_precision(dtype: torch.dtype) -> None:
    scores = torch.randn(4, 8, 12, generator=torch.Generator().manual_seed(3)).to(dtype)
    tokens = torch.randint(12, (4, 8), generator=torch.Generator().manual_seed(4))
    loss = torch.nn.functional.cross_entropy(scores.float().flatten(0, 1), tokens.flatten())
    metric = TMMetrics("Perplexity")
    metric.update(scores, tokens)
    assert float(metric.compute()) == pytest.approx(float(loss.exp()), rel=1e-5)


def test_scores_of_classes_for_a_metric_of_numbers_are_answered_with_a_metric_of_classes() -> None:
    with pytest.raises(EvaluationError, match="of scores of classes use Accuracy"):
        TMMetrics("MeanSquaredError").update(torch.ones(4, 3), torch.ones(4))
    with pytest.raises(EvaluationError, match="cannot count") as raised:  # one column has no classes
        TMMetrics("CosineSimilarity").update(torch.ones(4, 1), torch.ones(4))
    assert "Accuracy" not in str(raised.value)
