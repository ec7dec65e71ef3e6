"""The project that the tests of several processes train: samples know their number, and a hook notes who saw which."""

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from trainwright.events import get_event_storage
from trainwright.parallel import get_rank


class Samples(Dataset):
    def __init__(self, length: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.inputs = torch.randn(length, 6, generator=generator)
        self.labels = (self.inputs @ torch.randn(6, 3, generator=generator)).argmax(1)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"inputs": self.inputs[index], "labels": self.labels[index], "number": index}

    def __len__(self) -> int:
        return len(self.inputs)


class Model(nn.Module):
    """Writes the numbers of the samples that it trains on, a line per micro-batch, beside the output folder."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, inputs: Tensor, labels: Tensor, number: Tensor) -> dict[str, Tensor]:
        scores = self.body(inputs)
        if not self.training:
            return {"prediction_scores": scores}
        with open(Path(os.environ["SEEN_FOLDER"]) / f"rank{get_rank()}.jsonl", "a") as file:
            file.write(json.dumps([get_event_storage().iter, number.tolist()]) + "\n")
        return {"loss": F.cross_entropy(scores, labels)}
