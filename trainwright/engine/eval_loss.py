"""The loss of an evaluation: an exact mean over samples, accumulated on the device and read once."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trainwright.engine.comparison import predictions_of, shifted
from trainwright.engine.loss_fn import target_of
from trainwright.parallel.dist import all_gather_object


class MeanLoss:
    """Mean over all samples (or labels) of per-batch mean losses."""

    def __init__(self) -> None:
        self._total: Tensor | None = None
        self._weight: Tensor | None = None

    def add(self, loss: Tensor | None, weight: int | Tensor) -> None:
        """Add a batch whose loss is the mean over ``weight`` samples or labels; None if the model returned no loss."""
        if loss is None:
            return
        loss = loss.detach()
        wide = loss.double() if loss.device.type != "mps" else loss
        weight = torch.as_tensor(weight, device=loss.device)
        weighted = torch.where(weight > 0, wide * weight, torch.zeros_like(wide))  # the mean of zero items is NaN
        self._total = weighted if self._total is None else self._total + weighted
        self._weight = weight if self._weight is None else self._weight + weight

    def so_far(self) -> Tensor | None:
        """The mean on this rank so far, on its device; None before the first batch."""
        return None if self._total is None or self._weight is None else self._total / self._weight

    def results(self) -> dict[str, float]:
        """``loss`` over the samples of all ranks, if there is one. Every rank must call this."""
        is_empty = self._total is None or self._weight is None or not self._weight.item()
        mine = None if is_empty else (self._total.item(), self._weight.item())  # type: ignore[union-attr]
        shares = [share for share in all_gather_object(mine) if share is not None]
        return {"loss": sum(t for t, _ in shares) / sum(n for _, n in shares)} if shares else {}


def weight_of(
    outputs: Mapping[str, Any], inputs: Any, ignored: int = -100, *, is_shifted: bool = False
) -> int | Tensor:
    """The number of items that a batch's loss averages: the model's ``num_tokens``, or the labels that are not ignored.

    ``is_shifted``: the first label of each row has no score.

    The number of samples, if scores and labels do not have the shapes of a cross-entropy. B batch, L tokens,
    C classes: labels (B,) or (B, L), scores (B, C), (B, L, C) or (B, C, L).
    """
    if "num_tokens" in outputs:
        return torch.as_tensor(outputs["num_tokens"])
    scores, labels = predictions_of(outputs), target_of(inputs)
    if is_shifted:
        scores, labels = shifted(scores, labels)
    if isinstance(scores, Tensor) and isinstance(labels, Tensor) and scores.dim() == labels.dim() + 1:
        is_of_classes = not labels.is_floating_point() and scores.is_floating_point()
        shapes = scores.shape[:-1], (scores.shape[0], *scores.shape[2:])
        if is_of_classes and labels.shape in shapes:
            return (labels != ignored).sum()
    return batch_size(inputs)


def reduce_own_results(results: Mapping[str, float], samples: int) -> dict[str, float]:
    """Average the results of a user's evaluation code over the ranks, weighted by each rank's ``samples``."""
    shares = [(values, n) for values, n in all_gather_object((dict(results), samples)) if n]
    if len(shares) < 2:
        return shares[0][0] if shares else dict(results)
    names = [name for name in shares[0][0] if all(name in values for values, _ in shares)]
    total = sum(n for _, n in shares)
    return {name: sum(values[name] * n for values, n in shares) / total for name in names}


def batch_size(inputs: Any) -> int:
    """The number of samples in a batch: the first dimension of its first tensor; 1 if there is none."""
    if isinstance(inputs, Tensor):
        return inputs.shape[0] if inputs.dim() else 1
    parts = inputs.values() if isinstance(inputs, Mapping) else inputs if isinstance(inputs, tuple | list) else ()
    return next((part.shape[0] for part in parts if isinstance(part, Tensor) and part.dim()), 1)
