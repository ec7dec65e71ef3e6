"""Settings of a training have the effect that they have on one process, also where a process has a part of the model.

A trainer of each layout is built after another in the same processes.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.distributed.layout_runs import Record
from tests.ranks import on_ranks
from tests.toys import quiet
from trainwright import Trainer
from trainwright.data import ColumnDataset
from trainwright.parallel.layout import Layout

GLOBAL_BATCH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, hidden: Tensor) -> Any:
        return hidden + self.down(torch.relu(self.up(self.norm(hidden))))


class Tower(nn.Module):
    pipeline_layers = "layers"
    tensor_plan = {"layers.*.norm": "norm", "layers.*.up": "colwise", "layers.*.down": "rowwise"}  # noqa: RUF012

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.layers, self.head = nn.Linear(6, 8), nn.ModuleList(Block() for _ in range(4)), nn.Linear(8, 5)
        if kind == "transposed":
            self.head.weight = nn.Parameter(torch.randn(8, 5).t())
        if kind == "shared":
            self.layers[3], self.layers[2].norm = self.layers[0], self.layers[1].norm  # type: ignore[union-attr]
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(kind not in ("head", "stem") or name.startswith(kind))

    def before_layers(self, features: Tensor) -> Any:
        return self.stem(features)

    def after_layers(self, hidden: Tensor, features: Tensor) -> Any:
        return self.head(hidden)

    def forward(self, features: Tensor) -> Any:
        hidden = self.before_layers(features)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.after_layers(hidden, features)


def data(length: int, seed: int) -> ColumnDataset:
    features = torch.randn(length, 6, generator=torch.Generator().manual_seed(seed))
    return ColumnDataset(features=features, labels=(features[:, 0] > 0) * 2 + (features[:, 1] > 0))


def train(folder: Path, layout: dict[str, Any], kind: str = "", **settings: Any) -> dict[str, Any]:
    """Losses, norms, and an evaluation after the training."""
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    size = GLOBAL_BATCH // Layout.of(layout, world).data
    usual = {"optimizer": "AdamW", "learning_rate": 0.03, "max_grad_norm": 0.5, "save_enabled": False, "num_epochs": 2}
    config = quiet(folder, batch_size=size, **{**usual, **settings, **layout})
    trainer = Trainer(Tower(kind), config, data(32, 0), data(13, 1))
    record = Record()
    trainer.register_hooks([record])
    trainer.train()
    return {"losses": record.losses, "norms": record.norms, "results": trainer.evaluate()}


STAGES = {"pipeline_parallel_size": 2}
PARTS = {"tensor_parallel_size": 2}
SHARES = {"zero_stage": 3}
BY_LAYER = {"layer_decay": 0.5, "weight_decay": 0.1, "decay_norm_and_bias": False}
LATER = {"unfreeze": [{"epoch": 1, "layers": ["stem", "layers", "head.bias"]}]}
BEST = {"save_enabled": True, "load_best_model_at_end": True, "save_top_k": 1, "num_epochs": 3, "learning_rate": 0.3}
SGD = {"optimizer": "SGD"}
CASES: dict[int, list[tuple[dict[str, Any], str, dict[str, Any]]]] = {
    2: [
        (STAGES, "", BY_LAYER),
        (STAGES, "", LATER),
        (STAGES, "head", {}),
        (STAGES, "stem", {}),
        (PARTS, "transposed", {}),
        (PARTS, "shared", {}),
        (PARTS, "", SGD),
        (SHARES, "", {"optimizer": "Adagrad"}),
        (SHARES, "", SGD | BEST),
    ],
    4: [(STAGES, "", LATER), (STAGES | SHARES, "", SGD | BEST)],
}


def train_all(folder: Path, world_size: int) -> list[dict[str, Any]]:
    return [
        train(folder / str(number), layout, kind, **settings)
        for number, (layout, kind, settings) in enumerate(CASES[world_size])
    ]


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_settings_have_the_effect_of_one_process(world_size: int, tmp_path: Path) -> None:
    ranks = on_ranks(train_all, tmp_path / "ranks", world_size, world_size=world_size, timeout=200)
    for number, (_, kind, settings) in enumerate(CASES[world_size]):
        alone = train(tmp_path / "one" / str(number), {}, kind, **settings)
        for rank in ranks:
            for name, values in alone.items():
                assert rank[number][name] == pytest.approx(values, abs=1e-5), (number, name)


def resume(folder: Path, layout: dict[str, Any]) -> list[float]:
    settings: dict[str, Any] = {"save_enabled": True, "resume_from_checkpoint": True, "num_epochs": 4, **SGD}
    return list(train(folder, layout, **settings)["losses"])


def test_sgd_of_one_process_continues_on_two(tmp_path: Path) -> None:
    for folder in ("alone", "two"):
        train(tmp_path / folder, {}, save_enabled=True, **SGD)
    alone = resume(tmp_path / "alone", {})
    for losses in on_ranks(resume, tmp_path / "two", PARTS, timeout=120):
        assert losses == pytest.approx(alone, abs=1e-5)
