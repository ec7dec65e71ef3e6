"""Correlation of predicted numbers with true ones."""

from typing import Any

import torch
from torch import Tensor

from trainwright.evaluation.evaluator import DatasetEvaluator, EvaluationError, required
from trainwright.evaluation.torchmetrics_function import torchmetrics_function


class RegEvaluator(DatasetEvaluator):
    """``{"pearson", "spearman", "corr"}``, each in [-1, 1]; ``corr`` is the mean of the other two.

    Reads one number per sample from ``outputs["prediction_scores"]`` and ``inputs["labels"]``, shape (B) or (B, 1).
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._predictions: list[Tensor] = []
        self._labels: list[Tensor] = []

    def process(self, inputs: Any, outputs: Any) -> None:
        predictions: Tensor = required(outputs, "prediction_scores", evaluator=self, where="what the model returns")
        labels: Tensor = required(inputs, "labels", evaluator=self, where="the batch")
        if predictions.numel() != labels.numel() or labels.numel() != labels.shape[:1].numel():
            raise EvaluationError(
                f"RegEvaluator: prediction_scores has shape {tuple(predictions.shape)} and labels "
                f"{tuple(labels.shape)}; both must be (batch,) or (batch, 1)."
            )
        self._predictions.append(predictions.detach().flatten())
        self._labels.append(labels.detach().flatten())

    def known_results(self) -> list[str]:
        return ["pearson", "spearman", "corr"]

    def evaluate(self) -> dict[str, float]:
        # In double precision on the host: ranks and products of many samples lose digits in float32.
        predictions, labels = (
            torch.cat(parts).cpu().double() if parts else torch.empty(0) for parts in (self._predictions, self._labels)
        )
        if len(labels) < 2:
            raise EvaluationError(f"RegEvaluator has seen {len(labels)} samples; a correlation needs at least two.")
        pearson = float(torchmetrics_function("regression", "pearson_corrcoef")(predictions, labels))
        spearman = float(torchmetrics_function("regression", "spearman_corrcoef")(predictions, labels))
        return {"pearson": pearson, "spearman": spearman, "corr": (pearson + spearman) / 2}
