"""The project that is killed: handwritten digits, and randomness of every kind that a training knows.

It keeps its own history, outside of the run's folder and without the library: after each update one line with
the samples, what was made of them, the learning rate, and a checksum of everything that was learned. Whether a resume
was exact is read from there.
"""

import hashlib
import json
import os
import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import Dataset

from trainwright.events import get_event_storage
from trainwright.parallel import get_rank

TRACE = "TORTURE_TRACE"  # environment: the file of the history; those of further ranks have their number behind it


class Digits(Dataset):
    """Digits of 8 x 8 pixels. Those to train on are shifted, weighted and made noisy at random each time."""

    def __init__(self, start: int, stop: int, is_train: bool) -> None:
        digits = load_digits()
        self.images = torch.from_numpy(digits.images[start:stop]).float()[:, None] / 16
        self.labels = torch.from_numpy(digits.target[start:stop])
        self.is_train = is_train

    def __getitem__(self, index: int) -> dict[str, Any]:
        image = self.images[index]
        if self.is_train:
            image = torch.roll(image, (random.randint(-1, 1), random.randint(-1, 1)), (1, 2))
            image = image * float(np.random.uniform(0.8, 1.2))
            image = image + 0.1 * torch.randn(image.shape)
        return {"images": image, "labels": self.labels[index], "number": index}

    def __len__(self) -> int:
        return len(self.labels)


class Net(nn.Module):
    """A convolution with BatchNorm and dropout. ``is_plain``: with neither, so that it learns alike on any ranks."""

    def __init__(self, is_plain: bool = False) -> None:
        super().__init__()
        self.features = nn.Conv2d(1, 8, 3, padding=1)
        self.norm = nn.Identity() if is_plain else nn.BatchNorm2d(8)
        self.dropout = nn.Dropout(0.0 if is_plain else 0.2)
        self.classifier = nn.Linear(8 * 16, 10)
        history.model = self

    def forward(self, images: Tensor, labels: Tensor, number: Tensor) -> dict[str, Tensor]:
        x = F.max_pool2d(F.relu(self.norm(self.features(images))), 2)
        scores = self.classifier(self.dropout(x.flatten(1)))
        if not self.training:
            return {"prediction_scores": scores, "labels": labels}
        history.note_batch(images, number)
        return {"loss": F.cross_entropy(scores, labels)}


class History:
    """Writes a line for each update, when the optimizer has made its step."""

    def __init__(self) -> None:
        self.model: nn.Module | None = None
        self._samples: list[int] = []
        self._inputs = hashlib.sha256()

    def note_batch(self, images: Tensor, number: Tensor) -> None:
        self._samples += number.tolist()
        self._inputs.update(bytes_of(images))

    def after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        assert self.model is not None
        if TRACE not in os.environ:
            self._samples.clear()
            return
        line = {
            "iteration": get_event_storage().iter,
            "samples": self._samples,
            "inputs": self._inputs.hexdigest(),
            "lr": optimizer.param_groups[0]["lr"],
            "state": digest(self.model, optimizer),
        }
        self._samples, self._inputs = [], hashlib.sha256()
        append(line)


history = History()


def append(line: dict[str, Any]) -> None:
    """One line, on the disk when this returns."""
    path = os.environ[TRACE] + (f".rank{get_rank()}" if get_rank() else "")
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(descriptor, (json.dumps(line) + "\n").encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """A sha256 of all weights, buffers, and tensors of the optimizer, with their names."""
    found = hashlib.sha256()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        found.update(name.encode() + bytes_of(tensor))
    for number, state in optimizer.state_dict()["state"].items():
        for name, value in sorted(state.items()):
            found.update(f"{number}.{name}".encode() + bytes_of(torch.as_tensor(value)))
    return found.hexdigest()


def bytes_of(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().numpy().tobytes()


def adamw(params: Iterable[Any], **settings: Any) -> torch.optim.AdamW:
    """torch's AdamW, with the history behind each of its steps."""
    optimizer = torch.optim.AdamW(params, **settings)
    optimizer.register_step_post_hook(history.after_step)
    return optimizer
