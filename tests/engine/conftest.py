"""What tests of the engine share."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Classifier(nn.Module):
    """B batch, F features, C classes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"losses": F.cross_entropy(self.body(inputs), labels)}


def batches(count: int, size: int = 8) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        {
            "inputs": torch.randn(size, 6, generator=generator),
            "labels": torch.randint(3, (size,), generator=generator),
        }
        for _ in range(count)
    ]


def classifier() -> Classifier:
    torch.manual_seed(0)
    return Classifier()
