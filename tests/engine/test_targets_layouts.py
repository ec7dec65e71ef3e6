"""One update is the same for any micro-batches and processes, for each way to declare what a loss averages.

float32; each run is one update of 8 texts with very uneven labels, compared with a plain backward pass of one batch.
B batch, L tokens, V vocabulary.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from tests.ranks import on_ranks
from tests.toys import quiet
from trainwright import DefaultTrainer, LazyCall, Trainer, get_config
from trainwright.base.dist import get_world_size
from trainwright.data import build_image_train_loader
from trainwright.tasks.text_generation.model import GPTTextGeneration, GPTTextGenerationConfig

VOCABULARY, LENGTH, IGNORED = 7, 6, -100

# Way to declare: the kind of loss, the settings, and the criterion.
WAYS: dict[str, tuple[str, dict[str, Any], nn.Module | None]] = {
    "num_tokens": ("tokens", {}, None),
    "a class of loss_ignores": ("class", {"loss_ignores": 2}, None),
    "two of loss_ignores": ("classes", {"loss_ignores": [2, IGNORED]}, None),
    "loss_ignores=None": ("samples", {"loss_ignores": None}, None),
    "criterion": ("scores", {}, nn.CrossEntropyLoss(weight=torch.linspace(0.5, 2.0, VOCABULARY), ignore_index=2)),
    "loss_type": ("next", {}, None),
    "labels without -100": ("labels", {}, None),
    "samples": ("numbers", {}, None),
}


class Texts(Dataset[dict[str, Tensor]]):
    def __init__(self, kind: str) -> None:
        generator = torch.Generator().manual_seed(3)
        self.ids = torch.randint(VOCABULARY, (8, LENGTH), generator=generator)
        counts = torch.arange(LENGTH) < torch.tensor([6, 1, 2, 6, 3, 1, 5, 2])[:, None]
        self.labels = torch.where(counts, self.ids, 2 if kind in ("class", "classes", "scores") else IGNORED)
        if kind == "classes":
            self.labels[:, 0] = IGNORED
            self.labels[:, 1] = 3
        if kind == "numbers":
            self.labels = torch.rand(8, LENGTH, generator=generator)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"token_ids": self.ids[index], "labels": self.labels[index]}


class Net(GPTTextGeneration):
    """Returns its loss by ``kind``; it can be cut into stages."""

    loss_type = None  # type: ignore[assignment]

    def __init__(self, kind: str = "labels") -> None:
        torch.manual_seed(0)
        super().__init__(
            GPTTextGenerationConfig(
                vocab_size=VOCABULARY,
                hidden_size=8,
                num_hidden_layers=2,
                num_attention_heads=2,
                hidden_dropout_prob=0.0,
            )
        )
        self.kind = kind
        self.loss_type = "ForCausalLM" if kind == "next" else None  # type: ignore[assignment]

    def forward(self, token_ids: Tensor, labels: Tensor) -> Any:  # type: ignore[override]
        hidden = self.before_layers(token_ids, labels)
        for block in self.blocks:
            hidden = block(hidden, None)
        return self.after_layers(hidden, token_ids, labels)

    def after_layers(self, hidden: Tensor, token_ids: Tensor, labels: Tensor) -> Any:  # type: ignore[override]
        return self.outputs(super().after_layers(hidden)["logits"], labels)

    def before_layers(self, token_ids: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        return super().before_layers(token_ids)

    def layer_arguments(self, token_ids: Tensor, labels: Tensor) -> Any:  # type: ignore[override]
        return super().layer_arguments(token_ids)

    def outputs(self, logits_BLV: Tensor, labels: Tensor) -> Any:
        if self.kind == "scores":
            return {"logits": logits_BLV.transpose(1, 2)}
        if self.kind == "numbers":
            return {"loss": (logits_BLV[..., 0] - labels).square().mean()}
        if self.kind == "next":
            return {"loss": F.cross_entropy(logits_BLV[:, :-1].flatten(0, 1), labels[:, 1:].flatten())}
        ignored = {"class": (2,), "classes": (2, IGNORED)}.get(self.kind, (IGNORED,))
        counts_BL = torch.stack([labels != one for one in ignored]).all(0)
        each_BL = F.cross_entropy(logits_BLV.transpose(1, 2), labels.masked_fill(~counts_BL, IGNORED), reduction="none")
        if self.kind == "samples":
            return {"loss": (each_BL.sum(1) / counts_BL.sum(1)).mean()}
        loss = {"loss": each_BL.sum() / counts_BL.sum()}
        return {**loss, "num_tokens": counts_BL.sum()} if self.kind == "tokens" else loss

    compute_loss = None  # type: ignore[assignment]


def weights_of(model: nn.Module) -> Tensor:
    parts = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return torch.cat([part.detach().flatten() for part in parts])


def by_hand(way: str) -> tuple[Tensor, float]:
    kind, _, criterion = WAYS[way]
    model, batch = Net(kind), torch.utils.data.default_collate([*Texts(kind)])
    outputs = model(**batch)
    loss = outputs["loss"] if criterion is None else criterion(outputs["logits"], batch["labels"])
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    return weights_of(model), loss.item()


def by_objects(folder: Path, way: str, accumulation: int, **layout: Any) -> tuple[Tensor, float]:
    kind, settings, criterion = WAYS[way]
    ranks = get_world_size() // layout.get("pipeline_parallel_size", 1)
    config = quiet(
        folder / way / str(accumulation), num_epochs=1, batch_size=8 // ranks // accumulation, optimizer="SGD",
        learning_rate=0.5, gradient_accumulation_steps=accumulation, metrics=[], eval_strategy="no",
        save_enabled=False, **settings, **layout,
    )  # fmt: skip
    trainer = Trainer(Net(kind), config, Texts(kind), **({} if criterion is None else {"loss": criterion}))
    trainer.train()
    return weights_of(trainer.model), trainer.storage.history("total_loss").latest()


def by_file(folder: Path, way: str, accumulation: int, **layout: Any) -> tuple[Tensor, float]:
    kind, settings, _ = WAYS[way]
    ranks = get_world_size() // layout.get("pipeline_parallel_size", 1)
    cfg = get_config("common/defaults.py")
    cfg.model, cfg.optim = LazyCall(Net)(kind=kind), LazyCall(torch.optim.SGD)(lr=0.5, fused=False)
    loader = LazyCall(build_image_train_loader)(dataset=LazyCall(Texts)(kind=kind), num_workers=0)
    cfg.dataloader = {"train": loader}
    cfg.train.scheduler = LazyCall(torch.optim.lr_scheduler.ConstantLR)(factor=1.0)
    cfg.train.update(
        {"output_dir": str(folder / way / str(accumulation)), "train_micro_batch_size": 8 // ranks // accumulation}
        | {"num_accumulation_steps": accumulation, "train_iter": 1, "progress_bar": False, **settings}
    )
    cfg.train.evaluation.enabled = False
    zero = layout.pop("zero_stage", 0)
    cfg.train.zero_optimization.update({"enabled": bool(zero), "stage": zero or 1})
    cfg.train.dist.update(layout)
    trainer = DefaultTrainer(cfg)
    trainer.train()
    return weights_of(trainer.model), trainer.storage.history("total_loss").latest()


def all_ways(folder: Path, layouts: list[dict[str, Any]]) -> dict[str, tuple[Tensor | None, float]]:
    found: dict[str, tuple[Tensor | None, float]] = {}
    for number, layout in enumerate(layouts):
        stages = layout.get("pipeline_parallel_size", 1)
        for way in WAYS:
            for train in (by_objects, by_file):
                if train is by_file and way == "criterion":  # in config files the model computes the loss
                    continue
                for accumulation in (2,) if stages > 1 else (1, 2):
                    place = folder / f"{train.__name__}{number}"
                    weights, loss = train(place, way, accumulation, **layout)
                    name = f"{way}/{train.__name__}/{accumulation}/{layout}"
                    found[name] = (None if stages > 1 else weights, loss)  # a process has the weights of its stage
    return found


def assert_equal(name: str, weights: Tensor | None, loss: float) -> None:
    expected, expected_loss = by_hand(name.partition("/")[0])
    if weights is not None:
        torch.testing.assert_close(weights, expected, atol=1e-6, rtol=1e-6, msg=name)
    assert loss == pytest.approx(expected_loss, abs=1e-6), name


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("accumulation", [1, 2, 4, 8])
def test_micro_batches_give_the_update_of_one_batch(way: str, accumulation: int, tmp_path: Path) -> None:
    assert_equal(way, *by_objects(tmp_path / "objects", way, accumulation))
    if way != "criterion":
        assert_equal(way, *by_file(tmp_path / "file", way, accumulation))


LAYOUTS: dict[int, list[dict[str, Any]]] = {
    2: [{}, {"zero_stage": 3}, {"pipeline_parallel_size": 2}],
    4: [{}, {"zero_stage": 3}, {"pipeline_parallel_size": 2}],
}


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=[pytest.mark.slow, pytest.mark.exhaustive])])
def test_so_do_processes_in_each_layout(world_size: int, tmp_path: Path) -> None:
    for found in on_ranks(all_ways, tmp_path, LAYOUTS[world_size], world_size=world_size, timeout=280):
        for name, (weights, loss) in found.items():
            assert_equal(name, weights, loss)
