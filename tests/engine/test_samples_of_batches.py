"""Means over samples count the same samples in training, on several processes and in evaluations, whatever tensors the
batches have: a plain loop over batches of known sizes is the reference.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, default_collate

from tests.ranks import on_ranks
from tests.toys import assert_equal_weights, file_config, quiet
from trainwright import DefaultTrainer, Trainer
from trainwright.base.dist import get_rank
from trainwright.config import LazyCall
from trainwright.data import CyclicSampler
from trainwright.evaluation import PPLEvaluator

BOXES = [2, 1, 1, 3, 1, 1, 1, 1, 2, 2, 1, 1, 1, 1, 1, 1]  # of each image: 7, 4, 6 and 4 in the batches of 4 images


def images() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(0)
    return [(torch.randn(6, generator=draw), torch.rand(n, 4, generator=draw)) for n in BOXES]


def with_boxes(samples: Any) -> tuple[Tensor, Tensor]:
    boxes = [torch.cat([torch.full((len(b), 1), float(i)), b], 1) for i, (_, b) in enumerate(samples)]
    return torch.stack([image for image, _ in samples]), torch.cat(boxes)


def box_loss(model: Any, batch: Any) -> Tensor:
    images, boxes = batch
    return (model(images)[boxes[:, 0].long()] - boxes[:, 1:]).abs().sum() / len(images)


class Detector(Trainer):
    def compute_loss(self, model: Any, inputs: Any) -> Tensor:
        return box_loss(model, inputs)


def net(features: int = 6, outputs: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(features, outputs)


def plain_loop(model: nn.Module, updates: list[list[tuple[Any, int]]], loss_of: Any, lr: float = 0.1) -> nn.Module:
    """Updates of micro-batches of so many samples each."""
    optimizer = torch.optim.SGD(model.parameters(), lr)
    for batches in updates:
        total = sum(size for _, size in batches)
        sum(loss_of(model, batch) * size / total for batch, size in batches).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def settings(folder: Path, **more: Any) -> Any:
    usual: dict[str, Any] = {"num_epochs": 1, "batch_size": 4, "dataloader_shuffle": False, "metrics": None}
    usual |= {"optimizer": {"name_": "SGD", "fused": False}, "learning_rate": 0.1, "eval_strategy": "no"}
    return quiet(folder, **{**usual, **more})


@pytest.mark.parametrize("is_own_loader", [False, True])
def test_the_images_of_a_batch_with_boxes_count(tmp_path: Path, is_own_loader: bool) -> None:
    data = images()
    batches = [with_boxes(data[at : at + 4]) for at in range(0, 16, 4)]
    expected = plain_loop(net(), [[(b, 4) for b in batches[:2]], [(b, 4) for b in batches[2:]]], box_loss)
    loader = DataLoader(data, 4, collate_fn=with_boxes)
    given = (
        {"train_dataloader": loader, "eval_dataloader": loader}
        if is_own_loader
        else {"train_dataset": data, "eval_dataset": data, "data_collator": with_boxes}
    )
    trainer = Detector(net(), settings(tmp_path, gradient_accumulation_steps=2), **given)
    trainer.train()
    assert_equal_weights(trainer.model, expected)
    mean = sum(box_loss(trainer.model, batch).item() for batch in batches) / 4
    assert trainer.evaluate()["loss"] == pytest.approx(mean, rel=1e-6)


def boxes_on_a_rank(folder: str) -> list[float]:
    rank = get_rank()
    mine = [at for first in (0, 8) for at in range(first + 4 * rank, first + 4 * rank + 4)]
    loader = DataLoader(images(), 4, sampler=mine, collate_fn=with_boxes)
    trainer = Detector(net(), settings(Path(folder), save_enabled=False), train_dataloader=loader)
    trainer.train()
    weights: list[float] = trainer.model.weight.flatten().tolist()
    return weights


def test_the_images_of_each_process_count(tmp_path: Path) -> None:
    data = images()
    batches = [with_boxes(data[at : at + 4]) for at in range(0, 16, 4)]
    expected: Any = plain_loop(net(), [[(b, 4) for b in batches[:2]], [(b, 4) for b in batches[2:]]], box_loss)
    for found in on_ranks(boxes_on_a_rank, str(tmp_path)):
        torch.testing.assert_close(torch.tensor(found), expected.weight.detach().flatten())


class Rows(Dataset[Any]):
    """Samples as one data set: a list would be several of them in a config file."""

    def __init__(self, rows: Iterable[Any]) -> None:
        self.rows = list(rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        return self.rows[index]


def pairs() -> Rows:
    draw = torch.Generator().manual_seed(3)
    drawn = [torch.randn(11, generator=draw) * (1 + 3 * (at > 11)) for at in range(14)]
    return Rows({"good": row[:5], "bad": row[5:10], "margin": row[10]} for row in drawn)


def two_rows_each(samples: Any) -> dict[str, Tensor]:
    """As TRL's collator of a reward model."""
    rows = [sample["good"] for sample in samples] + [sample["bad"] for sample in samples]
    return {"input_ids": torch.stack(rows), "margin": torch.stack([sample["margin"] for sample in samples])}


def reward_loss(model: Any, batch: Any) -> Tensor:
    good, bad = model(batch["input_ids"]).squeeze(-1).chunk(2)
    return -nn.functional.logsigmoid(good - bad - batch["margin"]).mean()


class Reward(Trainer):
    def compute_loss(self, model: Any, inputs: Any) -> Tensor:
        return reward_loss(model, inputs)


class RewardNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = net(5, 1)

    def forward(self, input_ids: Tensor, margin: Tensor) -> dict[str, Tensor]:
        return {"loss": reward_loss(self.layer, {"input_ids": input_ids, "margin": margin})}


@pytest.mark.parametrize("is_own_loader", [False, True])
def test_the_loss_of_an_evaluation_is_the_mean_over_pairs_of_rows(tmp_path: Path, is_own_loader: bool) -> None:
    data, model = pairs(), net(5, 1)
    tests = DataLoader(data, 4, collate_fn=two_rows_each) if is_own_loader else data
    trainer = Reward(model, settings(tmp_path), data, data_collator=two_rows_each)
    expected = reward_loss(model, two_rows_each(data.rows)).item()
    assert trainer.evaluate(tests)["loss"] == pytest.approx(expected, rel=1e-6)


def test_an_evaluator_of_a_config_file_counts_the_same_samples(tmp_path: Path) -> None:
    cfg = file_config(tmp_path, RewardNet, pairs, pairs, train_micro_batch_size=4, test_micro_batch_size=4)
    cfg.dataloader.train.collate_fn = cfg.dataloader.test[0].collate_fn = two_rows_each
    cfg.train.evaluation.evaluator = LazyCall(PPLEvaluator)()
    trainer = DefaultTrainer(cfg)
    found = trainer.test(trainer.cfg, trainer.test_loader, trainer.model)
    expected = trainer.model(**two_rows_each(pairs().rows))["loss"].exp().item()
    assert found["loss_PPL"] == pytest.approx(expected, rel=1e-5)


def rows() -> Rows:
    draw = torch.Generator().manual_seed(0)
    return Rows(
        {"x": torch.randn(3, generator=draw), "y": torch.randn(1, generator=draw), "bad": at in (0, 1, 2, 9)}
        for at in range(16)
    )


def without_bad(samples: Any) -> Any:
    return default_collate([{"x": sample["x"], "y": sample["y"]} for sample in samples if not sample["bad"]])


class Squares(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = net(3, 1)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.layer(x) - y).square().mean()}


def without_bad_plainly() -> nn.Module:
    data = rows().rows
    batches = [without_bad(data[first : first + 8]) for first in (0, 8)]
    return plain_loop(Squares(), [[(batch, len(batch["x"]))] for batch in batches], lambda m, b: m(**b)["loss"])


def test_samples_that_a_collator_leaves_out_do_not_count(tmp_path: Path) -> None:
    expected = without_bad_plainly()
    trainer = Trainer(
        Squares(), settings(tmp_path / "p", gradient_accumulation_steps=2), rows(), data_collator=without_bad
    )
    trainer.train()
    assert_close_weights(trainer.model, expected)
    cfg = file_config(tmp_path / "c", Squares, rows, train_micro_batch_size=4, num_accumulation_steps=2, train_iter=2)
    cfg.optim = LazyCall(torch.optim.SGD)(lr=0.1)
    cfg.train.scheduler = LazyCall(torch.optim.lr_scheduler.ConstantLR)(factor=1.0)
    cfg.train.evaluation.enabled = False
    cfg.dataloader.train.update({"collate_fn": without_bad, "sampler": CyclicSampler})
    config_trainer = DefaultTrainer(cfg)
    config_trainer.train()
    assert_close_weights(config_trainer.model, expected)


def left_out_on_a_rank(folder: str) -> list[float]:
    trainer = Trainer(Squares(), settings(Path(folder)), rows(), data_collator=without_bad)
    trainer.train()
    weights: list[float] = trainer.model.layer.weight.flatten().tolist()
    return weights


def test_samples_that_a_collator_leaves_out_on_one_process_do_not_count(tmp_path: Path) -> None:
    expected: Any = without_bad_plainly()
    for found in on_ranks(left_out_on_a_rank, str(tmp_path)):
        torch.testing.assert_close(torch.tensor(found), expected.layer.weight.detach().flatten())


def assert_close_weights(a: nn.Module, b: nn.Module) -> None:
    for ours, theirs in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
