"""The loss of an evaluation: an exact mean over samples, counted on the device and read once."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor


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
        """``loss``, if there was one."""
        return {} if self._total is None else {"loss": self._total.item() / self.samples}


def batch_size(inputs: Any) -> int:
    """How many samples a batch holds: the first dimension of its first tensor; 1 where there is none."""
    if isinstance(inputs, Tensor):
        return inputs.shape[0] if inputs.dim() else 1
    parts = inputs.values() if isinstance(inputs, Mapping) else inputs if isinstance(inputs, tuple | list) else ()
    return next((part.shape[0] for part in parts if isinstance(part, Tensor) and part.dim()), 1)
