"""The loss of an evaluation: an exact mean over samples, counted on the device and read once."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from trainwright.parallel.dist import all_gather_object


class MeanLoss:
    """The mean over all samples of losses that are means over batches."""

    def __init__(self) -> None:
        self._total: Tensor | None = None
        self.samples = 0

    def add(self, loss: Tensor | None, size: int) -> None:
        """Count a batch of ``size`` samples; None if the model gave no loss."""
        if loss is None:
            return
        loss = loss.detach()
        weighted = (loss.double() if loss.device.type != "mps" else loss) * size
        self._total = weighted if self._total is None else self._total + weighted
        self.samples += size

    def results(self) -> dict[str, float]:
        """``loss`` over the samples of all ranks, if there was one. Every rank must call this."""
        mine = None if self._total is None else (self._total.item(), self.samples)
        shares = [share for share in all_gather_object(mine) if share is not None]
        return {"loss": sum(t for t, _ in shares) / sum(n for _, n in shares)} if shares else {}


def told_by_all(told: Mapping[str, float], samples: int) -> dict[str, float]:
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
