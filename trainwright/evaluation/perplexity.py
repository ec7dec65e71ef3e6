"""Perplexity of language-model losses."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trainwright.evaluation.evaluator import DatasetEvaluator, EvaluationError, described

# e**20 is half a billion: a model that knows nothing. Beyond it the figure would only overflow.
HIGHEST_LOSS = 20.0


class PPLEvaluator(DatasetEvaluator):
    """``{"lm_loss_PPL": perplexity}`` for each scalar that the model returns: exp of its mean over all samples.

    A model that returns a bare scalar gets ``loss_PPL``. A batch counts by its number of samples, and the mean loss is
    cut at 20 before exp.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._loss_sums: dict[str, Tensor] = {}  # on the device until evaluate()
        self._num_samples: dict[str, int] = {}

    def process(self, inputs: Any, outputs: Any) -> None:
        losses = {"loss": outputs} if isinstance(outputs, Tensor) else outputs
        losses = losses if isinstance(losses, Mapping) else {}
        losses = {name: loss for name, loss in losses.items() if _is_scalar(loss)}
        if not losses:
            raise EvaluationError(
                "PPLEvaluator needs a loss (a tensor of one element) in what the model returns in evaluation, "
                f"but got {described(outputs)}."
            )
        num_samples = _num_samples(inputs)
        for name, loss in losses.items():
            # MPS has no float64.
            wide = loss.detach().reshape(()).to(torch.float32 if loss.device.type == "mps" else torch.float64)
            self._loss_sums[name] = self._loss_sums.get(name, torch.zeros_like(wide)) + wide * num_samples
            self._num_samples[name] = self._num_samples.get(name, 0) + num_samples

    def evaluate(self) -> dict[str, float]:
        if not self._loss_sums:
            raise EvaluationError("PPLEvaluator has seen no samples.")
        means = {name: total.item() / self._num_samples[name] for name, total in self._loss_sums.items()}
        # The mean comes first: min() then lets NaN through instead of turning it into the limit.
        return {f"{name}_PPL": math.exp(min(mean, HIGHEST_LOSS)) for name, mean in means.items()}


def _is_scalar(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point()


def _num_samples(inputs: Any) -> int:
    values = inputs.values() if isinstance(inputs, Mapping) else [inputs]
    for value in values:
        if isinstance(value, Tensor) and value.ndim:
            return len(value)
    return 1
