import math

import pytest
import torch

from trainwright.evaluation import EvaluationError, PPLEvaluator


def batch(size: int) -> dict:
    return {"input_ids": torch.zeros(size, 7, dtype=torch.long)}


def test_batches_count_by_their_samples():
    evaluator = PPLEvaluator()
    evaluator.process(batch(3), {"lm_loss": torch.tensor(1.0)})
    evaluator.process(batch(1), {"lm_loss": torch.tensor(3.0)})
    assert evaluator.evaluate() == {"lm_loss_PPL": pytest.approx(math.exp((3 * 1.0 + 1 * 3.0) / 4))}


def test_each_of_several_losses_has_its_own_mean():
    evaluator = PPLEvaluator()
    evaluator.process(
        batch(2), {"lm_loss": torch.tensor([2.0]), "sop_loss": torch.tensor(0.5), "scores": torch.zeros(2, 9)}
    )
    evaluator.process(batch(2), {"lm_loss": torch.tensor(4.0)})
    assert evaluator.evaluate() == {
        "lm_loss_PPL": pytest.approx(math.exp(3.0)),
        "sop_loss_PPL": pytest.approx(math.exp(0.5)),
    }


def test_a_bare_scalar_is_a_loss():
    evaluator = PPLEvaluator()
    evaluator.process(batch(2), torch.tensor(0.25))
    assert evaluator.evaluate() == {"loss_PPL": pytest.approx(math.exp(0.25))}


def test_a_hopeless_loss_is_cut_and_nan_is_not_hidden():
    evaluator = PPLEvaluator()
    evaluator.process(batch(2), {"a_loss": torch.tensor(1000.0), "b_loss": torch.tensor(math.nan)})
    results = evaluator.evaluate()
    assert results["a_loss_PPL"] == math.exp(20)
    assert math.isnan(results["b_loss_PPL"])


def test_a_model_without_a_loss_is_named():
    with pytest.raises(EvaluationError, match="'prediction_scores'"):
        PPLEvaluator().process(batch(2), {"prediction_scores": torch.zeros(2, 3)})
    with pytest.raises(EvaluationError, match="no samples"):
        PPLEvaluator().evaluate()
