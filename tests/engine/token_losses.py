"""Losses that are means over tokens or samples, and the plain loop that they are compared with.

B batch, L tokens, F features, C classes, V vocabulary. Everything is float64, so that 1e-6 is far above rounding.
"""

import copy
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

IGNORED = -100


EXACT = {"rtol": 1e-6, "atol": 1e-12}


class Language(nn.Module):
    """Predicts a token's label; says over how many its loss is a mean."""

    def __init__(self, says: Any = lambda count: count) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 7)).double()
        self.says = says

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Any]:
        logits_BLV = self.body(inputs)
        loss = F.cross_entropy(logits_BLV.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
        accuracy = (logits_BLV.argmax(-1) == labels)[labels != IGNORED].double().mean()
        return {"loss": loss, "num_tokens": self.says((labels != IGNORED).sum()), "accuracy": accuracy}


class Points(Dataset):
    def __init__(self, length: int) -> None:
        generator = torch.Generator().manual_seed(3)
        self.inputs = torch.randn(length, 4, generator=generator, dtype=torch.float64)
        self.labels = torch.randint(3, (length,), generator=generator)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"inputs": self.inputs[index], "labels": self.labels[index]}

    def slice(self, indices: Iterable[int]) -> dict[str, Tensor]:
        picked = list(indices)
        return {"inputs": self.inputs[picked], "labels": self.labels[picked]}


class Sentences(Points):
    """Of 1 to 6 tokens that count; every 5th has none at all."""

    def __init__(self, length: int) -> None:
        generator = torch.Generator().manual_seed(4)
        self.inputs = torch.randint(7, (length, 6), generator=generator)
        self.labels = torch.randint(7, (length, 6), generator=generator)
        for index in range(length):
            self.labels[index, 0 if index % 5 == 4 else 1 + index % 6 :] = IGNORED


def model_of(kind: type[nn.Module], *arguments: Any) -> nn.Module:
    torch.manual_seed(0)
    return kind(*arguments)


def by_hand(model: nn.Module, updates: list[dict[str, Tensor]], lr: float = 0.3) -> tuple[nn.Module, list[float]]:
    """A plain loop with one batch for each update."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    losses = []
    for batch in updates:
        loss = model(**batch)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


def assert_same(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, left), right in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(left, right, msg=lambda text, name=name: f"{name}: {text}", **EXACT)


def sgd(model: nn.Module, lr: float = 0.3) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
