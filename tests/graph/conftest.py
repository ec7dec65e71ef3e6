"""Models, batches and trainings that graph mode is compared with eager steps on."""

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from trainwright import Trainer, TrainingConfig
from trainwright.engine import EagerTrainer, GraphBase, GraphTrainer
from trainwright.graph import optimizer as compiled_optimizer
from trainwright.hooks import HookBase

UPDATES = 200
CHANGE_AT, FEW_UPDATES = 10, 24  # of runs in which something changes


@pytest.fixture(autouse=True)
def _log_lines(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.INFO, "trainwright")
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "propagate", False)  # megabytes for listeners


@pytest.fixture(params=[False, True], ids=["one program", "step outside"])
def is_outside(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the optimizer steps outside of the program, as with a hundred parameters."""
    if request.param:
        monkeypatch.setattr(compiled_optimizer, "_MOST_PARAMETERS", 0)
    return bool(request.param)


class Net(nn.Module):
    """Dropout, batch normalization, a buffer that counts, and a second figure."""

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        # Without the bias, whose gradient would be rounding alone: an optimizer that divides by it goes anywhere.
        first = nn.Linear(6, 16, bias=False)
        self.layers = nn.Sequential(first, nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 4))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        logits = self.layers(inputs)
        return {"loss": F.cross_entropy(logits, labels), "accuracy": (logits.argmax(-1) == labels).float().mean()}


def batches(count: int, size: int = 8, seed: int = 0) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            "inputs": torch.randn(size, 6, generator=generator),
            "labels": torch.randint(0, 4, (size,), generator=generator),
        }
        for _ in range(count)
    ]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, fused=True)


class Run:
    """A training of so many updates, eager or not."""

    def __init__(
        self,
        graph: str | None,
        data: Any = None,
        *,
        net: Callable[[], nn.Module] = Net,
        optimizer: Callable[[Any], torch.optim.Optimizer] = adamw,
        hooks: Callable[[torch.optim.Optimizer], list[HookBase]] = lambda optimizer: [],
        updates: int = UPDATES,
        accumulation: int = 1,
        **settings: Any,
    ) -> None:
        torch.manual_seed(0)
        self.model = net()
        self.optimizer = optimizer(self.model.parameters())
        loader = batches(7) if data is None else data
        torch.manual_seed(1)
        if graph is None:
            trainer = EagerTrainer(self.model, loader, self.optimizer, accumulation, **settings)
        else:
            base = GraphBase(self.model, self.optimizer, backend=graph)
            trainer = GraphTrainer(base, loader, accumulation, **settings)
        self.trainer = trainer
        trainer.register_hooks(hooks(self.optimizer))
        trainer.train(0, updates)

    def values(self, name: str = "total_loss") -> Tensor:
        return torch.tensor([value for value, _ in self.trainer.storage.history(name).values()])


def captures(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "are one program" in r.getMessage()]


def refusals(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "stay eager" in r.getMessage()]


def has_compiler() -> bool:
    return bool(shutil.which("g++") or shutil.which("clang++"))


class Event(HookBase):
    """Something that happens to the model after an iteration."""

    def __init__(self, happens: dict[int, Callable[[Any], None]]) -> None:
        self._happens = happens

    def after_step(self) -> None:
        self._happens.get(self.trainer.iter, lambda trainer: None)(self.trainer)


class Small(nn.Module):
    """Two layers of one shape: their states can change places."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(self.second(torch.tanh(self.first(inputs))), labels)}


def both(change: Callable[[Any, Any], Any] | None = None, **settings: Any) -> tuple[Run, Run]:
    """An eager run and one of programs, with the same change after a step; their losses and weights are the same."""
    if change is not None:
        at = {CHANGE_AT: lambda trainer: change(trainer._plain_model, trainer.optimizer)}
        settings["hooks"] = lambda optimizer: [Event(at)]
    settings = {"net": Small, "updates": FEW_UPDATES, **settings}
    eager, graph = Run(None, **settings), Run("aot_eager", **settings)
    torch.testing.assert_close(graph.values(), eager.values(), rtol=1e-5, atol=1e-5)
    for left, right in zip(graph.model.parameters(), eager.model.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-4)
    if change is not None:
        undisturbed = Run(None, **{**settings, "hooks": lambda optimizer: []})
        assert (undisturbed.values() - eager.values()).abs().max() > 1e-4  # it did matter
    return eager, graph


class Pictures(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.1)

    def forward(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        scores = self.layers(images).flatten(1)[:, :4]
        return {"loss": F.cross_entropy(scores, labels, weight=torch.arange(1.0, 5), label_smoothing=0.1)}


def losses(backend: str | None, *layers: nn.Module) -> tuple[Tensor, Any]:
    """Of a training on pictures, and who trained."""
    images = torch.randn(3, 8, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    data = [{"images": each, "labels": torch.arange(8) % 4} for each in images]
    run = Run(backend, data, net=lambda: Pictures(*layers), updates=12)
    return run.values(), run.trainer


def train_by_trainer(folder: Path, resume: Any = None, *, graph: bool = True, **settings: Any) -> Trainer:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(160, 6, generator=generator), torch.arange(160) % 4)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4))
    config = TrainingConfig(
        output_dir=str(folder), graph=graph, loss="CrossEntropyLoss", batch_size=8, num_epochs=3, learning_rate=0.01,
        eval_strategy="no", progress_bar=False, resume_from_checkpoint=resume, **settings,
    )  # fmt: skip
    trainer = Trainer(model, config, train_dataset=data)
    trainer.train()
    return trainer


class Schedule(HookBase):
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, UPDATES)

    def after_step(self) -> None:
        self._scheduler.step()
