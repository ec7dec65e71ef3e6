"""What the tests of the Python API on several ranks train: samples know their number.

B batch, F features, C classes.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.distributed.project import Samples


class Points(Samples):
    """float64."""

    def __init__(self, length: int, seed: int) -> None:
        super().__init__(length, seed)
        self.inputs = self.inputs.double()


class Model(nn.Module):
    """float64. ``unused``: has a layer that takes no part; ``tokens``: its loss is a mean over tokens; ``spoils``: the
    sample with which the loss, though not the gradients, is NaN.
    """

    def __init__(self, unused: bool = False, tokens: bool = False, spoils: int = -1, dropout: float = 0.0) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3))
        self.unused = nn.Linear(2, 2) if unused else None
        self.tokens, self.spoils = tokens, spoils
        self.double()

    def forward(self, inputs: Tensor, labels: Tensor, number: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.body(inputs)
        if not self.tokens:
            loss = F.cross_entropy(logits, labels)
            is_spoilt = self.training and number is not None and self.spoils in number
            return {"logits": logits, "loss": loss + torch.nan if is_spoilt else loss}
        loss = F.cross_entropy(logits, labels, ignore_index=0)
        return {"logits": logits, "loss": loss, "num_tokens": (labels != 0).sum()}
