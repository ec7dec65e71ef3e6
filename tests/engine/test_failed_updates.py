"""An update that fails, or a loop that is left, and a training that continues: each sample counts once."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.toys import Samples, Stream, assert_equal_weights, file_config, quiet
from trainwright import DefaultTrainer, LazyCall, Trainer
from trainwright.data import ColumnDataset, CyclicSampler, build_image_train_loader
from trainwright.engine import TrainingLoop

INPUTS_BF, BATCH = torch.randn(24, 3, generator=torch.Generator().manual_seed(0)), 2


class FailsOnce(torch.autograd.Function):
    """Its ``at``-th backward pass fails."""

    at, calls = 0, 0

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        FailsOnce.calls += 1
        if FailsOnce.calls == FailsOnce.at:
            raise RuntimeError("simulated failure")
        return gradient


class Net(nn.Module):
    """Two layers, between which a backward pass may fail; it knows which samples it has had."""

    fails_at, seen = 0, list[int]()

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor, index: Tensor) -> dict[str, Tensor]:
        Net.seen += index.tolist()
        if len(Net.seen) == Net.fails_at:
            raise RuntimeError("simulated failure")
        return {"loss": (self.last(FailsOnce.apply(self.first(x))) - x[:, :1]).square().mean()}


def samples() -> Samples:
    return Samples(x=INPUTS_BF, index=lambda index: index)


def stream() -> Stream:
    return Stream([samples()[index] for index in range(24)])


def shuffled() -> DataLoader[Any]:
    return DataLoader(samples(), BATCH, shuffle=True, generator=torch.Generator().manual_seed(3))


DATA = {"samples": samples, "stream": stream, "own loader": shuffled}


def trainer_of(api: str, folder: Path, data: str, accumulation: int) -> Any:
    if api == "Trainer":
        settings = {"batch_size": BATCH, "gradient_accumulation_steps": accumulation, "max_steps": 12}
        part = "train_dataloader" if data == "own loader" else "train_dataset"
        fields = quiet(folder, metrics=[], eval_strategy="no", dataloader_num_workers=0, save_enabled=False, **settings)
        return Trainer(Net(), fields, **{part: DATA[data]()})
    sizes = {"train_micro_batch_size": BATCH, "num_accumulation_steps": accumulation, "train_iter": 12 // accumulation}
    cfg = file_config(folder, Net, samples, **sizes)
    cfg._set_flag("allow_objects", True)
    if data == "own loader":
        cfg.dataloader.train = shuffled()
    else:
        cfg.dataloader.train.dataset = DATA[data]()
    cfg.train.scheduler = LazyCall(torch.optim.lr_scheduler.ConstantLR)(factor=1.0)
    return DefaultTrainer(cfg)


@pytest.mark.parametrize("api", ["Trainer", "config file"])
@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize(
    ("accumulation", "forward_at", "backward_at"), [(2, 12, 0), (1, 0, 3), (2, 0, 4)], ids=["batch", "memory", "window"]
)
def test_an_update_that_failed_is_made_again_from_its_first_sample(
    api: str, data: str, accumulation: int, forward_at: int, backward_at: int, tmp_path: Path
) -> None:
    def trained(name: str, *, fails: bool) -> tuple[nn.Module, list[int]]:
        Net.seen, Net.fails_at = [], forward_at if fails else 0
        FailsOnce.calls, FailsOnce.at = 0, backward_at if fails else 0
        trainer = trainer_of(api, tmp_path / name, data, accumulation)
        if fails:
            with pytest.raises(RuntimeError, match="simulated failure"):
                trainer.train()
        before = len(Net.seen)
        trainer.train()
        assert trainer.iterations_done == 12 // accumulation
        return trainer.model, Net.seen[before:]

    whole, order = trained("whole", fails=False)
    model, later = trained("failed", fails=True)
    done = 24 - len(later)
    assert 0 < done < 24
    assert later == order[done:]
    assert_equal_weights(model, whole)


def test_an_update_whose_labels_are_all_ignored_changes_nothing(tmp_path: Path) -> None:
    labels = torch.arange(12).remainder(2).index_fill(0, torch.arange(4, 8), -100)
    settings = {"batch_size": 2, "gradient_accumulation_steps": 2, "loss": "CrossEntropyLoss", "num_epochs": 1}
    fields = quiet(
        tmp_path,
        metrics=[],
        eval_strategy="no",
        optimizer="SGD",
        learning_rate=0.1,
        dataloader_shuffle=False,
        **settings,
    )
    model = nn.Linear(3, 2)
    plain = copy.deepcopy(model)
    trainer = Trainer(model, fields, TensorDataset(INPUTS_BF[:12], labels))
    trainer.train()
    losses = [value for value, _ in trainer.storage.history("total_loss").values()]
    assert losses[1] == 0
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for first in (0, 8):
        part = slice(first, first + 4)
        loss = nn.functional.cross_entropy(plain(INPUTS_BF[part]), labels[part])
        assert losses[first // 4] == pytest.approx(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for left, right in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(left, right, atol=1e-6, rtol=0)  # two halves in place of one batch


@pytest.mark.parametrize("is_behind", [False, True], ids=["before the step", "behind the step"])
def test_a_loop_that_is_left_counts_an_iteration_if_the_optimizer_has_stepped(is_behind: bool, tmp_path: Path) -> None:
    def loop(name: str) -> tuple[nn.Module, Any, TrainingLoop]:
        torch.manual_seed(1)
        model = nn.Linear(3, 1)
        data = ColumnDataset(x=INPUTS_BF, index=torch.arange(24))
        loader, optimizer = (
            build_image_train_loader(data, BATCH, num_workers=0)[0],
            torch.optim.SGD(model.parameters(), 0.1),
        )
        settings: dict[str, Any] = {"max_iter": 12, "output_dir": tmp_path / name, "log_period": 1, "save_period": 6}
        return model, optimizer, TrainingLoop(model, optimizer, loader, **settings)

    def go_on(model: nn.Module, optimizer: Any, loop: TrainingLoop, stop: int | None, seen: list[int]) -> None:
        for batch in loop:
            if not is_behind and loop.iter == stop:
                break
            seen += batch["index"].tolist()
            loss = model(batch["x"]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loop.storage.put_scalar("total_loss", loss.detach())
            if is_behind and loop.iter == stop:
                break

    whole, cut = loop("whole"), loop("cut")
    expected: list[int] = []
    go_on(*whole, None, expected)
    seen: list[int] = []
    go_on(*cut, 5, seen)
    assert cut[2].iterations_done == 5 + is_behind
    go_on(*cut, None, seen)
    assert seen == expected
    assert_equal_weights(cut[0], whole[0])
    rows = [
        (folder / "metrics.json").read_text().count('"total_loss"') for folder in (tmp_path / "whole", tmp_path / "cut")
    ]
    assert rows == [12, 12]
    checkpoints = [sorted(path.name for path in (tmp_path / name).glob("model_*")) for name in ("whole", "cut")]
    assert checkpoints[0] == checkpoints[1]


class Drawing(nn.Module):
    """Dropout and running statistics, of which the second micro-batch of an update may fail."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.norm, self.dropout, self.last = nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 1)
        self.calls = self.fails_at = 0

    def forward(self, x: Tensor, index: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        scores = self.last(self.dropout(self.norm(x)))
        if self.calls == self.fails_at:
            raise RuntimeError("simulated failure")
        return {"loss": (scores - x[:, :1]).square().mean()}


@pytest.mark.parametrize("api", ["Trainer", "config file"])
def test_what_a_failed_attempt_has_drawn_and_added_to_running_statistics_stays_as_in_a_plain_loop(
    api: str, tmp_path: Path
) -> None:
    plain = Drawing()
    plain.fails_at = 6
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    torch.manual_seed(7)
    updates = [[INPUTS_BF[at : at + 2], INPUTS_BF[at + 2 : at + 4]] for at in range(0, 24, 4)]
    while updates:
        try:
            for x in updates[0]:
                (plain(x, x)["loss"] / 2).backward()
            optimizer.step()
            del updates[0]
        except RuntimeError:
            pass
        optimizer.zero_grad()

    if api == "Trainer":
        config = quiet(
            tmp_path, batch_size=2, gradient_accumulation_steps=2, num_epochs=1, seed=7, metrics=[], eval_strategy="no",
            optimizer={"name_": "SGD", "fused": False}, learning_rate=0.1, dataloader_shuffle=False,
        )  # fmt: skip
        trainer: Any = Trainer(Drawing(), config, samples())
    else:
        cfg = file_config(tmp_path, Drawing, samples, train_micro_batch_size=2, num_accumulation_steps=2, train_iter=6)
        cfg.train.update({"seed": 7, "scheduler": LazyCall(torch.optim.lr_scheduler.ConstantLR)(factor=1.0)})
        cfg.optim = LazyCall(torch.optim.SGD)(params={}, lr=0.1, fused=False)
        cfg.dataloader.train.sampler = LazyCall(CyclicSampler)(shuffle=False)
        trainer = DefaultTrainer(cfg)
    trainer.model.fails_at = 6
    with pytest.raises(RuntimeError, match="simulated failure"):
        trainer.train()
    trainer.train()
    assert trainer.model.norm.num_batches_tracked == 14  # two more than 12
    assert_equal_weights(trainer.model, plain)
