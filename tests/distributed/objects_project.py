"""What the tests of the Python API on several ranks train: samples know their number.

B batch, F features, C classes.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset


class Points(Dataset):
    def __init__(self, length: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.inputs = torch.randn(length, 6, generator=generator).double()
        self.labels = (self.inputs @ torch.randn(6, 3, generator=generator).double()).argmax(1)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"inputs": self.inputs[index], "labels": self.labels[index], "number": index}


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
