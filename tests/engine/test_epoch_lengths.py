"""The length of an epoch is asked when it starts: data that grow, shrink or follow a curriculum; batches by tokens."""

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset

from tests.ranks import on_ranks
from tests.toys import assert_equal_weights, file_config, quiet
from trainwright import DefaultTrainer, Trainer
from trainwright.base.dist import get_rank
from trainwright.base.errors import ConfigError
from trainwright.data import CyclicSampler
from trainwright.hooks import Callback, HookBase

X, Y = torch.randn(64, 3, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 2
LONGER, SHORTER = (16, 32, 64), (64, 32, 16)


class Lengths:
    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.sizes, self.epoch = sizes, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.sizes[min(self.epoch, len(self.sizes) - 1)]


class Order(Lengths, Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(len(self), generator=torch.Generator().manual_seed(self.epoch)).tolist())


class Curriculum(Lengths, Dataset[Any]):
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return X[index], Y[index]


class MaxTokens:
    """Batches of up to 90 tokens: their number depends on the order."""

    epoch = 0
    lengths = torch.randint(3, 30, (64,), generator=torch.Generator().manual_seed(1)).tolist()

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        batch: list[int] = []
        for index in torch.randperm(64, generator=torch.Generator().manual_seed(self.epoch)).tolist():
            if sum(self.lengths[at] for at in batch) + self.lengths[index] > 90:
                yield batch
                batch = []
            batch.append(index)
        yield batch

    def __len__(self) -> int:
        return sum(1 for _ in self)


def data_of(kind: str, sizes: tuple[int, ...], workers: int = 0) -> dict[str, Any]:
    if kind == "data set":
        return {"train_dataset": Curriculum(sizes)}
    if kind == "tokens":
        loader = DataLoader(TensorDataset(X, Y), batch_sampler=MaxTokens(), num_workers=workers)  # type: ignore[arg-type]
    elif kind == "sampler":
        loader = DataLoader(TensorDataset(X, Y), 8, sampler=Order(sizes), num_workers=workers)
    else:
        loader = DataLoader(Curriculum(sizes), 8, num_workers=workers)
    return {"train_dataloader": loader}


class Seen(Callback):
    """The batches of each epoch, by those of its begin and its end; the samples that were read."""

    def __init__(self, stops_after: int = 0) -> None:
        self.epochs: list[tuple[int, list[int]]] = []
        self.ended: list[int] = []
        self.updates: list[int] = []
        self.stops_after, self.done = stops_after, 0

    def on_epoch_begin(self, epochs: int, logs: Any) -> None:
        self.epochs.append((epochs, []))

    def on_train_batch_end(self, batch: Any, logs: Any) -> None:
        self.epochs[-1][1].append(logs["epoch_step"])
        self.done += 1
        if self.done == self.stops_after:
            raise KeyboardInterrupt

    def on_epoch_end(self, epochs: int, logs: Any) -> None:
        self.ended.append(epochs)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.1), nn.Linear(4, 2))


def trainer_of(folder: Path, data: dict[str, Any], *callbacks: Callback, **settings: Any) -> Trainer:
    usual = {"num_epochs": 3, "batch_size": 8, "eval_strategy": "no", "metrics": None, "save_enabled": False}
    usual |= {"lr_scheduler_type": "linear", "learning_rate": 0.01}
    return Trainer(net(), quiet(folder, **{**usual, **settings}), callbacks=callbacks, **data)


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize(
    ("kind", "sizes", "batches"),
    [
        *((kind, LONGER, [2, 4, 8]) for kind in ("sampler", "loader", "data set")),
        *((kind, SHORTER, [8, 4, 2]) for kind in ("sampler", "loader", "data set")),
        ("tokens", (), [14, 13, 13]),
    ],
)
def test_each_epoch_has_all_of_its_batches(
    tmp_path: Path, kind: str, sizes: tuple[int, ...], batches: list[int], accumulation: int
) -> None:
    seen = Seen()
    trainer = trainer_of(tmp_path, data_of(kind, sizes), seen, gradient_accumulation_steps=accumulation)
    trainer.train()
    assert seen.epochs == [(number, [*range(1, n + 1)]) for number, n in enumerate(batches, 1)]
    assert seen.ended == [1, 2, 3]
    assert trainer.iterations_done == sum(-(-n // accumulation) for n in batches)
    assert trainer.state.global_step == trainer.total_steps == sum(batches)
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(0, abs=1e-9), "the schedule ends with the run"


def test_a_run_says_when_its_length_changes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "trainwright.engine"):
        trainer_of(tmp_path, data_of("sampler", LONGER)).train()
    lines = [record.message for record in caplog.records if "is now planned with" in record.message]
    assert len(lines) == 2
    assert lines[0].startswith("Epoch 2 has 4 batches (the epoch before: 2).")
    assert "planned with 10 updates" in lines[0]
    assert "planned with 14 updates" in lines[1]


@pytest.mark.parametrize("kind", ["sampler", "data set"])
@pytest.mark.parametrize("sizes", [LONGER, SHORTER])
def test_each_epoch_has_one_line(
    kind: str, sizes: tuple[int, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"eval_strategy": "epoch", "progress_bar": True, "early_stopping": None}
    data = data_of(kind, sizes)
    with caplog.at_level(logging.INFO, "trainwright"):
        trainer_of(tmp_path, {**data, "eval_dataset": TensorDataset(X, Y)}, **settings).train()
    lines = [text for text in caplog.messages if re.match(r"Epoch \d/|Evaluation ", text)]
    assert [text.split("  ")[0] for text in lines] == ["Epoch 1/3", "Epoch 2/3", "Epoch 3/3"]
    assert all("eval_loss" in text for text in lines)


def test_each_epoch_of_a_resume_with_fewer_samples_has_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"eval_strategy": "epoch", "progress_bar": True, "early_stopping": None, "save_enabled": True}
    data: dict[str, Any] = {"train_dataset": TensorDataset(X, Y), "eval_dataset": TensorDataset(X, Y)}
    trainer_of(tmp_path, data, num_epochs=2, **settings).train()
    data["train_dataset"] = TensorDataset(X[:40], Y[:40])
    caplog.clear()
    with caplog.at_level(logging.INFO, "trainwright"):
        trainer = trainer_of(tmp_path, data, num_epochs=4, resume_from_checkpoint=True, **settings)
        trainer.train()
    lines = [text for text in caplog.messages if re.match(r"Epoch \d/|Evaluation ", text)]
    assert [text.split("  ")[0] for text in lines] == ["Epoch 3/4", "Epoch 4/4"]
    assert trainer.sample_ids(17) is not None, "of this start"
    assert trainer.sample_ids(16) is None, "the length was another one"


@pytest.mark.parametrize("stop", [2, 5, 6, 9])  # where an epoch ends, and within one
@pytest.mark.parametrize(
    ("kind", "sizes", "settings"),
    [
        ("sampler", LONGER, {}),
        ("sampler", LONGER, {"gradient_accumulation_steps": 2}),
        ("loader", SHORTER, {}),
        ("data set", LONGER, {"gradient_accumulation_steps": 2}),
        ("data set", SHORTER, {}),
        ("tokens", (), {}),
    ],
)
def test_a_resume_is_exact(tmp_path: Path, kind: str, sizes: Any, settings: dict[str, Any], stop: int) -> None:
    whole = trainer_of(tmp_path / "whole", data_of(kind, sizes), **settings)
    whole.train()
    saved = {"save_enabled": True, "save_steps": 1, **settings}
    with pytest.raises(KeyboardInterrupt):
        trainer_of(tmp_path / "run", data_of(kind, sizes), Seen(stop), **saved).train()
    seen = Seen()
    resumed = trainer_of(tmp_path / "run", data_of(kind, sizes), seen, resume_from_checkpoint=True, **saved)
    assert 0 < resumed.state.global_step <= stop
    resumed.train()
    assert_equal_weights(resumed.model, whole.model)
    assert resumed.state.global_step == whole.state.global_step
    assert resumed.optimizer.param_groups[0]["lr"] == whole.optimizer.param_groups[0]["lr"]
    assert seen.ended[-1] == 3


@pytest.mark.parametrize("kind", ["loader", "data set"])
def test_a_resume_with_workers_is_exact(tmp_path: Path, kind: str) -> None:
    workers = {"dataloader_num_workers": 1}
    whole = trainer_of(tmp_path / "whole", data_of(kind, LONGER, 1), **workers)
    whole.train()
    saved = {"save_enabled": True, "save_steps": 1, **workers}
    with pytest.raises(KeyboardInterrupt):
        trainer_of(tmp_path / "run", data_of(kind, LONGER, 1), Seen(5), **saved).train()
    resumed = trainer_of(tmp_path / "run", data_of(kind, LONGER, 1), resume_from_checkpoint=True, **saved)
    resumed.train()
    assert_equal_weights(resumed.model, whole.model)


def test_data_of_another_length_within_an_epoch_are_refused(tmp_path: Path) -> None:
    saved = {"save_enabled": True, "save_steps": 1}
    with pytest.raises(KeyboardInterrupt):
        trainer_of(tmp_path, data_of("sampler", LONGER), Seen(5), **saved).train()
    other = trainer_of(tmp_path, data_of("sampler", (16, 48, 64)), resume_from_checkpoint=True, **saved)
    with pytest.raises(ConfigError, match=r"epoch 2 had 4 batches .* has 6"):
        other.train()


def test_limits_hold_for_each_epoch(tmp_path: Path) -> None:
    seen = Seen()
    trainer_of(tmp_path, data_of("sampler", LONGER), seen, limit_train_batches=3).train()
    assert [len(steps) for _, steps in seen.epochs] == [2, 3, 3]
    seen = Seen()
    trainer_of(tmp_path, data_of("data set", SHORTER), seen, limit_train_batches=0.5).train()
    assert [len(steps) for _, steps in seen.epochs] == [4, 2, 1]
    seen = Seen()
    trainer_of(tmp_path, data_of("loader", LONGER), seen, max_steps=9).train()
    assert [len(steps) for _, steps in seen.epochs] == [2, 4, 3], "in all, as max_steps says"


class Growing(Dataset[Any]):
    def __init__(self) -> None:
        self.length, self.read = 8, set[int]()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.read.add(int(index))
        return {"x": X[index], "labels": Y[index], "index": int(index)}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = net()

    def forward(self, x: Tensor, labels: Tensor, index: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.cross_entropy(self.layer(x), labels)}


class Grow(Callback):
    def __init__(self, data: Growing) -> None:
        self.data, self.seen = data, set[int]()

    def on_epoch_begin(self, epochs: int, logs: Any) -> None:
        self.data.length = 8 * epochs

    def on_train_batch_end(self, batch: Any, logs: Any) -> None:
        self.seen.update(batch["index"].tolist())


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("is_own_loader", [False, True])
def test_a_data_set_that_a_callback_extends_is_read_completely(
    tmp_path: Path, is_own_loader: bool, workers: int
) -> None:
    data = Growing()
    grow = Grow(data)
    loader = DataLoader(data, 4, num_workers=workers)
    given = {"train_dataloader": loader} if is_own_loader else {"train_dataset": data}
    config = quiet(
        tmp_path, num_epochs=3, batch_size=4, dataloader_num_workers=workers, eval_strategy="no", metrics=None
    )
    trainer = Trainer(Net(), config, callbacks=[grow], **given)
    trainer.train()
    assert grow.seen == set(range(24))
    assert trainer.state.global_step == 2 + 4 + 6


def epochs_on_a_rank(folder: str, lengths: list[tuple[int, ...]]) -> Any:
    sizes = lengths[get_rank()]
    loader = DataLoader(TensorDataset(X, Y), 4, sampler=Order(sizes))
    trainer = trainer_of(Path(folder), {"train_dataloader": loader}, gradient_accumulation_steps=2)
    try:
        trainer.train()
    except ConfigError as error:
        return str(error)
    return trainer.state.global_step, trainer.model[0].weight.tolist()


def test_several_processes_make_the_steps_of_each_epoch_together(tmp_path: Path) -> None:
    first, second = on_ranks(epochs_on_a_rank, str(tmp_path / "run"), [(8, 16, 32)] * 2)
    assert first == second
    assert first[0] == 2 + 4 + 8
    for refusal in on_ranks(epochs_on_a_rank, str(tmp_path / "other"), [(8, 16, 32), (8, 12, 32)]):
        assert "its lengths are 4, 3 on the 2 processes" in refusal


class GrowWithSteps(HookBase):
    def __init__(self, data: Any) -> None:
        self.data = data

    def after_step(self) -> None:
        self.data.length = min(24, 8 + 8 * ((self.trainer.iter + 1) // 2))


@pytest.mark.parametrize("shuffle", [False, True])
def test_data_that_grow_are_read_completely_in_a_run_of_a_config_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, shuffle: bool
) -> None:
    cfg = file_config(tmp_path, Net, Growing, train_micro_batch_size=4, train_iter=12, progress_bar=False)
    if not shuffle:
        cfg.dataloader.train.sampler = CyclicSampler
    cfg.train.evaluation.enabled = False
    trainer = DefaultTrainer(cfg)
    data = trainer.train_loader.dataset
    data = data.datasets[0] if hasattr(data, "datasets") else data
    trainer.register_hooks([GrowWithSteps(data)])
    with caplog.at_level(logging.INFO, "trainwright.engine"):
        trainer.train()
    assert data.read == set(range(24))
    assert "The training data have 24 samples now (before: 16)" in caplog.text


class Shrinking(Curriculum):
    def __init__(self) -> None:
        super().__init__((61, 36, 10))

    def __getitem__(self, index: int) -> Any:
        if index >= len(self):
            raise IndexError(index)
        return {"x": X[index], "labels": Y[index], "index": int(index)}


class ShrinkingBatches(Shrinking):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


def shrinking_run_of_a_file(folder: str, data: type[Shrinking], size: int) -> Any:
    cfg = file_config(Path(folder), Net, data, train_micro_batch_size=size, train_iter=15, progress_bar=False)
    cfg.train.evaluation.enabled = False
    trainer = DefaultTrainer(cfg)
    seen = GrowSeen()
    trainer.add_callback(seen)
    trainer.train()
    return seen.seen, [trainer.sample_ids(update) for update in range(1, 16)]


class GrowSeen(Callback):
    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def on_train_batch_end(self, batch: Any, logs: Any) -> None:
        self.seen.append(batch["index"].tolist())


@pytest.mark.parametrize("data", [Shrinking, ShrinkingBatches])
def test_data_that_shrink_in_set_epoch_are_read_in_a_run_of_a_config_file(
    tmp_path: Path, data: type[Shrinking]
) -> None:
    """The last batch of an epoch takes the samples that it lacks by the length of that epoch."""
    seen, ids = shrinking_run_of_a_file(str(tmp_path / "one"), data, 8)
    assert ids == [[batch] for batch in seen]
    first, second = on_ranks(shrinking_run_of_a_file, str(tmp_path / "two"), data, 4)
    assert [[a + b] for a, b in zip(first[0], second[0], strict=True)] == first[1] == second[1] == ids


@pytest.mark.parametrize("update", [2, 3, 7, 14])  # 3 and 7: the first of an epoch
def test_an_update_of_a_longer_epoch_is_replayed(tmp_path: Path, update: int) -> None:
    def trainer() -> Trainer:
        return trainer_of(tmp_path, data_of("data set", LONGER), save_enabled=True, save_steps=5, log_steps=1)

    whole = trainer()
    whole.train()
    found = trainer().replay(update)
    assert found.is_equal
    assert found.samples == whole.sample_ids(update)
    assert [len(losses or []) for losses in found.facts.sample_losses] == [8]
    with pytest.raises(ConfigError, match="the run has the updates 1 to 14"):
        trainer().replay(15)
