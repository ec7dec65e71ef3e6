"""The mean loss of an evaluation is that of its samples, whatever the batches."""

from typing import Any

import pytest
import torch

from trainwright.engine.trainer.evaluation import EvalResults, MeanLoss, results_of_logs
from trainwright.hooks.callbacks.bridge import named_results


class NoMetrics:
    def reset(self) -> None:
        pass

    def compute(self) -> dict[str, Any]:
        return {}


def test_a_loss_counts_by_its_samples_and_the_mean_of_none_does_not() -> None:
    mean = MeanLoss()
    assert mean.so_far() is None
    for loss, weight in ((1.0, 3), (5.0, 1), (float("nan"), 0)):
        mean.add(torch.tensor(loss), weight)
    mean.add(None, 10)
    assert mean.total_and_weight() == (8.0, 4)
    assert mean.so_far() == 2.0


def test_values_of_the_users_own_step_are_the_only_results() -> None:
    results = EvalResults(NoMetrics())
    for loss, size in ((1.0, 3), (5.0, 1)):
        batch = {"x": torch.zeros(size, 2)}
        results.begin_batch(batch)
        results.add_own({"eval_step_loss": loss, "eval_epoch_metric": 0.5}, batch)
    assert results.compute() == {"loss": pytest.approx(2.0), "metric": 0.5}


def test_results_have_the_names_of_logs_and_back() -> None:
    logs = named_results({"loss": 0.5, "accuracy": 0.75})
    assert logs == {"eval_loss": 0.5, "eval_accuracy": 0.75, "eval_epoch_loss": 0.5, "eval_epoch_metric": 0.75}
    assert results_of_logs(logs) == {"loss": 0.5, "metric": 0.75, "accuracy": 0.75}
