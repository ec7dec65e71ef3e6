"""Accuracy of class scores.

B batch, C classes, K the largest k asked for.
"""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trainwright.config.errors import ConfigError
from trainwright.evaluation.evaluator import DatasetEvaluator, EvaluationError, required

logger = logging.getLogger("trainwright.evaluation")


class ClsEvaluator(DatasetEvaluator):
    """``{"Acc@1": percent, "Acc@5": percent}``: how often the label is among the k best scored classes.

    Reads ``outputs["prediction_scores"]`` (B, C) and ``inputs["labels"]`` (B) of any integer type. Samples are counted,
    so batches of unequal size do not bias the figure. Where there are fewer than k classes all of them are taken.
    """

    def __init__(self, topk: int | Sequence[int] = (1, 5)) -> None:
        self.topk = (topk,) if isinstance(topk, int) else tuple(topk)
        if not self.topk or any(not isinstance(k, int) or k < 1 for k in self.topk):
            raise ConfigError(f"ClsEvaluator.topk: got {topk!r}; it must be one or several whole numbers >= 1.")
        self._capped = False
        self.reset()

    def __repr__(self) -> str:
        return f"ClsEvaluator(topk={self.topk})"

    def reset(self) -> None:
        self._num_correct: Tensor | None = None  # one count per k, on the device until evaluate()
        self._num_samples = 0

    def process(self, inputs: Any, outputs: Any) -> None:
        scores_BC: Tensor = required(outputs, "prediction_scores", evaluator=self, where="what the model returns")
        labels_B: Tensor = required(inputs, "labels", evaluator=self, where="the batch")
        _check(scores_BC, labels_B)
        num_classes = scores_BC.shape[1]
        self._say_once_if_capped(num_classes)

        best_BK = scores_BC.topk(min(max(self.topk), num_classes), dim=1).indices
        correct_BK = best_BK == labels_B.to(best_BK.device, torch.int64).unsqueeze(1)
        num_correct = torch.stack([correct_BK[:, :k].sum() for k in self.topk])
        self._num_correct = num_correct if self._num_correct is None else self._num_correct + num_correct
        self._num_samples += len(labels_B)

    def evaluate(self) -> dict[str, float]:
        if self._num_correct is None or not self._num_samples:
            raise EvaluationError("ClsEvaluator has seen no samples.")
        num_correct = self._num_correct.tolist()
        return {f"Acc@{k}": 100 * count / self._num_samples for k, count in zip(self.topk, num_correct, strict=True)}

    def known_results(self) -> list[str]:
        return [f"Acc@{k}" for k in self.topk]

    def _say_once_if_capped(self, num_classes: int) -> None:
        if self._capped or max(self.topk) <= num_classes:
            return
        self._capped = True
        names = ", ".join(f"Acc@{k}" for k in self.topk if k > num_classes)
        logger.warning("%s: there are only %d classes, so all of them count and it is always 100.", names, num_classes)


def _check(scores_BC: Tensor, labels_B: Tensor) -> None:
    if scores_BC.ndim != 2 or labels_B.ndim != 1 or len(scores_BC) != len(labels_B):
        raise EvaluationError(
            f"ClsEvaluator: prediction_scores has shape {tuple(scores_BC.shape)} and labels {tuple(labels_B.shape)}; "
            "they must be (batch, classes) and (batch,)."
        )
    if labels_B.is_floating_point() or labels_B.is_complex():
        raise EvaluationError(
            f"ClsEvaluator: labels have type {labels_B.dtype}; they must be whole numbers, one class each."
        )
