"""The loss of an evaluation: an exact mean over samples, counted on the device and read once."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trainwright.engine.comparison import predictions_of, shifted
from trainwright.engine.loss_fn import target_of
from trainwright.parallel.dist import all_gather_object


class MeanLoss:
    """The mean over all samples, or labels, of losses that are means over those of a batch."""

    def __init__(self) -> None:
        self._total: Tensor | None = None
        self._weight: Tensor | None = None

    def add(self, loss: Tensor | None, weight: int | Tensor) -> None:
        """Count a batch: its loss is a mean over ``weight`` samples or labels; None if the model gave no loss."""
        if loss is None:
            return
        loss = loss.detach()
        wide = loss.double() if loss.device.type != "mps" else loss
        weight = torch.as_tensor(weight, device=loss.device)
        weighted = torch.where(weight > 0, wide * weight, torch.zeros_like(wide))  # a mean over nothing is NaN
        self._total = weighted if self._total is None else self._total + weighted
        self._weight = weight if self._weight is None else self._weight + weight

    def so_far(self) -> Tensor | None:
        """The mean over what this rank has counted, on its device; None if that is nothing."""
        return None if self._total is None or self._weight is None else self._total / self._weight

    def results(self) -> dict[str, float]:
        """``loss`` over the samples of all ranks, if there was one. Every rank must call this."""
        is_empty = self._total is None or self._weight is None or not self._weight.item()
        mine = None if is_empty else (self._total.item(), self._weight.item())  # type: ignore[union-attr]
        shares = [share for share in all_gather_object(mine) if share is not None]
        return {"loss": sum(t for t, _ in shares) / sum(n for _, n in shares)} if shares else {}


def weight_of(
    outputs: Mapping[str, Any], inputs: Any, ignored: int = -100, *, is_shifted: bool = False
) -> int | Tensor:
    """Over how much the loss of a batch is a mean: the ``num_tokens`` that the model tells, or the labels that count.

    ``is_shifted``: the first label of each row is compared with no score.

    Where scores and labels are not of the shape of a cross entropy it is the number of samples. B batch, L tokens,
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


def reduce_own_results(told: Mapping[str, float], samples: int) -> dict[str, float]:
    """Figures that each rank's own code has computed over its ``samples``: their means by these."""
    shares = [(values, n) for values, n in all_gather_object((dict(told), samples)) if n]
    if len(shares) < 2:
        return shares[0][0] if shares else dict(told)
    names = [name for name in shares[0][0] if all(name in values for values, _ in shares)]
    total = sum(n for _, n in shares)
    return {name: sum(values[name] * n for values, n in shares) / total for name in names}


def batch_size(inputs: Any) -> int:
    """How many samples a batch holds: the first dimension of its first tensor; 1 where there is none."""
    if isinstance(inputs, Tensor):
        return inputs.shape[0] if inputs.dim() else 1
    parts = inputs.values() if isinstance(inputs, Mapping) else inputs if isinstance(inputs, tuple | list) else ()
    return next((part.shape[0] for part in parts if isinstance(part, Tensor) and part.dim()), 1)
