"""The training that all peers run: the same model, data, optimizer and log interval."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from benchmarks.clock import Clock, timed
from benchmarks.models import MODELS, SplitGPT, WithLoss, loss_of, random_data

LEARNING_RATE = 1e-3
PICKED = ("tensors", "columns")  # data without a call of our code: the model calls the clock


class Samples(Dataset):
    """A typical dataset: one sample per index. The first sample of each batch calls the clock."""

    def __init__(
        self, x: Tensor, labels: Tensor, batch: int, clock: Callable[[], None], length: int | None = None
    ) -> None:
        self.x, self.labels, self._batch, self._clock = x, labels, batch, clock
        self._rows, self._length = len(x), length or len(x)
        self.num_read = 0

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if self.num_read % self._batch == 0:
            self._clock()
        self.num_read += 1
        row = index % self._rows  # a long dataset without much memory
        return {"x": self.x[row], "labels": self.labels[row]}


class Batches(Dataset):
    """A dataset that is read in complete batches; use it with ``collate_fn=as_it_is``."""

    def __init__(self, x: Tensor, labels: Tensor, clock: Callable[[], None]) -> None:
        self.x, self.labels, self._clock = x, labels, clock

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "labels": self.labels[index]}

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Tensor]:
        self._clock()
        chosen = torch.tensor(indices)
        return {"x": self.x.index_select(0, chosen), "labels": self.labels.index_select(0, chosen)}


def as_it_is(batch: Any) -> Any:
    return batch


@dataclass
class Job:
    """One training. ``steps`` counts batches of the loader, of one process."""

    model: str = "mlp"
    data: str = "samples"  # or "batches" (__getitems__), "tensors" (a TensorDataset), "columns" (tensors by name)
    steps: int = 2000
    batch: int = 32
    accumulation: int = 1
    precision: str = "fp32"  # or "bf16" (autocast), "medium" (float32 with bfloat16 matrix products)
    features: bool = False  # a progress bar on a terminal, a logger, checkpoints
    own_step: bool = False  # a custom training step, a callback, a training metric in every step
    ranks: int = 1
    log_every: int = 50
    device: str = "cpu"
    samples: int = 0  # 0: enough for all steps
    stop_at: int = 0  # the step after which to save and stop
    resume: str = ""  # the folder of such a training
    folder: str = "."
    hooks: list[Any] = field(default_factory=list)  # further hooks of our trainers
    settings: dict[str, Any] = field(default_factory=dict)  # further settings of our APIs
    is_compiled: bool = False  # a compiled program cannot call the clock
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self.warm = min(max(2, self.steps // 10), 200)

    def net(self) -> nn.Module:
        """The network, with the same initial weights for all peers."""
        torch.manual_seed(0)
        net = MODELS[self.model]()
        return timed(net, self.clock) if self.data in PICKED and not self.is_compiled else net

    def model_with_loss(self) -> nn.Module:
        net = self.net()
        return net if isinstance(net, SplitGPT) else WithLoss(net, gives_scores=self.own_step)

    loss = staticmethod(loss_of)

    def tensors(self) -> tuple[Tensor, Tensor]:
        length = self.samples or self.steps * self.batch * self.ranks
        rows = min(length, 2**16 if self.samples else 2**21)
        return random_data(self.model, rows)

    def dataset(self) -> Dataset:
        """Samples as dicts of ``x`` and ``labels``, or pairs of them where ``data`` is "tensors"."""
        x, labels = self.tensors()
        if self.data == "tensors":
            return TensorDataset(x, labels)
        self.read = Samples(x, labels, self.batch, self._unless_picked, self.samples or None)
        return self.read

    @property
    def _unless_picked(self) -> Callable[[], None]:
        return _nothing if self.data in PICKED else self.clock

    def batches(self) -> Batches:
        return Batches(*self.tensors(), self._unless_picked)

    def loader(self, **options: Any) -> DataLoader:
        """A shuffled ``DataLoader`` without workers."""
        dataset = options.pop("dataset", None) or self.dataset()
        if "sampler" not in options:
            options["shuffle"] = True
        return DataLoader(dataset, self.batch, **options)

    def optimizer(self, parameters: Any, **options: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=LEARNING_RATE, **options)

    def log(self, step: int, loss: float) -> None:
        """Write a log line, for the plain loop and peers without logging of their own."""
        with (Path(self.folder) / "log.jsonl").open("a") as log:
            log.write(json.dumps({"step": step, "loss": loss}) + "\n")


def _nothing() -> None:
    """Another function calls the clock."""
