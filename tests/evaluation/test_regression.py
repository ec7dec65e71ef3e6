import pytest
import torch

from trainwright.evaluation import EvaluationError, RegEvaluator


def pearson(x: torch.Tensor, y: torch.Tensor) -> float:
    x, y = x - x.mean(), y - y.mean()
    return float((x * y).sum() / (x.square().sum() * y.square().sum()).sqrt())


def test_correlations_over_all_batches_agree_with_their_definition():
    torch.manual_seed(0)
    labels = torch.randn(30, dtype=torch.float64)
    scores = labels.exp() + 0.1 * torch.randn(30, dtype=torch.float64)
    evaluator = RegEvaluator()
    for part in (slice(0, 20), slice(20, 30)):
        evaluator.process({"labels": labels[part]}, {"prediction_scores": scores[part].unsqueeze(1)})
    results = evaluator.evaluate()
    ranks = [values.argsort().argsort().double() for values in (scores, labels)]
    assert results["pearson"] == pytest.approx(pearson(scores, labels))
    assert results["spearman"] == pytest.approx(pearson(*ranks))
    assert results["corr"] == pytest.approx((results["pearson"] + results["spearman"]) / 2)


def test_one_sample_has_no_correlation():
    evaluator = RegEvaluator()
    evaluator.process({"labels": torch.tensor([1.0])}, {"prediction_scores": torch.tensor([1.0])})
    with pytest.raises(EvaluationError, match=r"1 samples.*at least two"):
        evaluator.evaluate()
    evaluator.reset()
    with pytest.raises(EvaluationError, match="0 samples"):
        evaluator.evaluate()


def test_scores_of_several_classes_are_refused():
    with pytest.raises(EvaluationError, match=r"\(4, 3\).*\(4,\)"):
        RegEvaluator().process({"labels": torch.zeros(4)}, {"prediction_scores": torch.zeros(4, 3)})
