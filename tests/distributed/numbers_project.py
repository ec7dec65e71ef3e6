"""Read by the tests as a configuration file: ragged sentences, and faults planted on rank 1 alone.

B batch, L tokens, V vocabulary.
"""

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from tests.toys import NanGradient
from trainwright.config import LazyCall, get_config
from trainwright.data import build_image_train_loader
from trainwright.events import get_event_storage
from trainwright.parallel import get_rank

IGNORED = -100


class Sentences(Dataset):
    """Of 1 to 6 tokens that count; every 5th has none at all."""

    def __init__(self, length: int) -> None:
        generator = torch.Generator().manual_seed(4)
        self.inputs = torch.randint(7, (length, 6), generator=generator)
        self.labels = torch.randint(7, (length, 6), generator=generator)
        for index in range(length):
            self.labels[index, 0 if index % 5 == 4 else 1 + index % 6 :] = IGNORED

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"inputs": self.inputs[index], "labels": self.labels[index], "number": index}

    def __len__(self) -> int:
        return len(self.inputs)


class Language(nn.Module):
    """float64. Notes the numbers of its samples, a line per micro-batch; ``spoils`` says what is spoilt and when."""

    def __init__(self, spoils: str = "", at: int = -1) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 7)).double()
        self.spoils, self.at = spoils, at
        self.passes = 0

    def forward(self, inputs: Tensor, labels: Tensor, number: Tensor) -> dict[str, Tensor]:
        iteration, self.passes = get_event_storage().iter, self.passes + 1
        with open(Path(os.environ["SEEN_FOLDER"]) / f"rank{get_rank()}.jsonl", "a") as file:
            file.write(json.dumps([iteration, number.tolist()]) + "\n")
        loss = F.cross_entropy(self.body(inputs).flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
        is_spoilt = get_rank() == 1 and self.passes - 1 == self.at
        if self.spoils == "own metric":
            get_event_storage().put_scalar("aux_loss", torch.nan if is_spoilt else 0.0)
        elif is_spoilt:
            loss = loss + torch.nan if self.spoils == "loss" else NanGradient.apply(loss)
        return {"loss": loss, "num_tokens": (labels != IGNORED).sum()}


model = LazyCall(Language)(spoils="", at=-1)
dataloader = {"train": LazyCall(build_image_train_loader)(dataset=LazyCall(Sentences)(length=50), num_workers=0)}
optim = LazyCall(torch.optim.SGD)(lr=0.3, momentum=0.9)
train = get_config("common/train.py").train
train.update(
    {
        "train_iter": 12,
        "log_period": 5,
        "train_micro_batch_size": 2,
        "checkpointer": {"period": 4},
        "scheduler": LazyCall(torch.optim.lr_scheduler.ConstantLR)(factor=1.0),
    }
)
